//! The names of ranks in messages.

#[derive(Debug, Default)]
pub(crate) struct Labels;

impl Labels {
    pub(crate) fn rank(&self, rank: usize, _pid: Option<u32>) -> String {
        format!("rank {rank}")
    }

    pub(crate) fn of_seat(&self, seat: usize) -> usize {
        seat
    }
}
