//! The arguments of the typed collectives: elements, operators, and buffers whose lengths fit each
//! other.

use half::{bf16, f16};
use hostccl::types::{DataType, ReduceOp};

use crate::error::{Error, Result};

pub(super) mod sealed {
    /// Gives the `ncclDataType_t` of an element type.
    pub trait Sealed: Copy {
        const DTYPE: i32;
    }
}

/// An element that communicator libraries know: `i8`, `u8`, `i32`, `u32`, `i64`, `u64`, `f32`,
/// `f64`, and `f16` and `bf16` of the crate half.
pub trait Element: sealed::Sealed {}

macro_rules! elements {
    ($($element:ty = $dtype:ident),+) => {$(
        impl sealed::Sealed for $element {
            const DTYPE: i32 = DataType::$dtype as i32;
        }
        impl Element for $element {}
    )+};
}

elements!(
    i8 = Int8,
    u8 = Uint8,
    i32 = Int32,
    u32 = Uint32,
    i64 = Int64,
    u64 = Uint64,
    f16 = Float16,
    f32 = Float32,
    f64 = Float64,
    bf16 = Bfloat16
);

/// How elements of several ranks become one; the numbers are `ncclRedOp_t`'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Operator {
    /// Their sum.
    Sum = ReduceOp::Sum as i32,
    /// Their product.
    Product = ReduceOp::Prod as i32,
    /// The largest. On the host engine it is NaN where a rank has NaN; NCCL ignores a NaN where
    /// another rank has a number.
    Max = ReduceOp::Max as i32,
    /// The smallest. NaNs are as in `Max`.
    Min = ReduceOp::Min as i32,
    /// Their sum divided by the number of ranks. On the host engine the sum does not overflow, and
    /// the average of integers is the exact sum, divided and truncated towards zero. NCCL adds
    /// integers in the element's own type, in which the sum can overflow.
    Average = ReduceOp::Avg as i32,
}

/// The count of an operation in which every rank gives `each` elements and one buffer, called
/// `long`, holds those of all `size` ranks.
pub(super) fn block_of_each_rank(
    name: &str,
    (long, elements): (&str, usize),
    (short, each): (&str, usize),
    size: usize,
) -> Result<usize> {
    if each.checked_mul(size) == Some(elements) {
        return Ok(each);
    }
    Err(Error::invalid(format!("{name}: {long} has {elements} elements, expected {size} times the {each} of {short}")))
}

/// The count of an operation in which both buffers hold a block for each of `size` ranks.
pub(super) fn block_for_each_rank(name: &str, send: usize, recv: usize, size: usize) -> Result<usize> {
    match send == recv && send % size == 0 {
        true => Ok(send / size),
        false => Err(Error::invalid(format!(
            "{name}: send has {send} elements and recv {recv}, expected the same multiple of {size}"
        ))),
    }
}

/// The root of an operation as NCCL takes it, which is a rank of the dimension.
pub(super) fn root_rank(name: &str, dim: &str, root: usize, size: usize) -> Result<i32> {
    match i32::try_from(root).ok().filter(|_| root < size) {
        Some(root) => Ok(root),
        None => Err(Error::invalid(format!("{name}: root is {root}, but dimension {dim} has ranks 0 to {}", size - 1))),
    }
}
