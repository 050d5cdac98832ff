//! Collectives over several hosts.
mod broadcast;
mod meeting;
mod operation;
mod plan;
mod reduction;
mod small;
mod small_gather;
#[cfg(test)]
mod tests;
mod work;

pub(crate) use self::operation::Spanning;
#[allow(unused_imports, reason = "split takes it")]
pub(crate) use self::small_gather::SmallGather;
