//! Integers that tell the rank and the call to which they belong, and floats that are all equal.

/// Returns element `i` of the input of `rank` in the call of that seed.
fn element(seed: usize, rank: usize, i: usize) -> i64 {
    (seed * 1_000_003 + rank * 10_007 + i) as i64
}

/// Returns elements `start..start + count` of the input of `rank`.
pub fn input(seed: usize, rank: usize, start: usize, count: usize) -> Vec<i64> {
    (start..start + count).map(|i| element(seed, rank, i)).collect()
}

/// Returns the sums of elements `start..start + count` of the inputs of `ranks` ranks.
pub fn sums(seed: usize, ranks: usize, start: usize, count: usize) -> Vec<i64> {
    (start..start + count).map(|i| (0..ranks).map(|rank| element(seed, rank, i)).sum()).collect()
}

/// Returns elements `start..start + count` of the inputs of `ranks` ranks, one rank after another.
pub fn gathered(seed: usize, ranks: usize, start: usize, count: usize) -> Vec<i64> {
    (0..ranks).flat_map(|rank| input(seed, rank, start, count)).collect()
}

/// Returns `count` times the number that fills an output before the call.
pub fn unset(count: usize) -> Vec<i64> {
    vec![-1; count]
}

/// Returns `count` times the value.
pub fn floats(value: f32, count: usize) -> Vec<f32> {
    vec![value; count]
}

/// Whether all numbers have the value.
pub fn are_all(numbers: &[f32], value: f32) -> bool {
    numbers.iter().all(|number| *number == value)
}
