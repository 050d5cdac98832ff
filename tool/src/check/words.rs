//! Numbers and ranks as the report writes them.

use crate::words::{listed_with, ranges};

/// The most ranks of a group that are listed.
const MEMBERS: usize = 8;

/// The ranks of a host, which are in ascending order: "ranks 0-3, 8".
pub fn runs(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let ranges = ranges(ranks.iter().copied());
    let listed = listed_with(ranges, MEMBERS, ", ", |_| format!(", ... {} ranks", ranks.len()));
    format!("{noun} {listed}")
}

/// The ranks of a group: "{0, 4}".
pub fn members(ranks: &[i32]) -> String {
    let listed = listed_with(ranks, MEMBERS, ", ", |_| format!(", ... {} ranks", ranks.len()));
    format!("{{{listed}}}")
}

/// The first ones of a list, and how many there are in all.
pub fn listed<T: ToString>(values: &[T]) -> String {
    listed_with(values.iter().map(T::to_string), MEMBERS, ", ", |_| format!(", ... {} in all", values.len()))
}

/// A bandwidth in GB/s with three significant digits, however slow the link is. It is always in
/// GB/s, as in nccl-tests and `--expect`, so that no figure has to be converted for a comparison.
pub fn gbps(bandwidth: f64) -> String {
    // The exponent is that of the rounded number: 9.996 is 10.0.
    let rounded = format!("{bandwidth:.2e}");
    let exponent = rounded.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok()).unwrap_or(2);
    let digits = usize::try_from(2 - exponent).unwrap_or(0);
    format!("{bandwidth:.digits$}")
}

/// The size in bytes below which a bandwidth says nothing, because all calls of smaller sizes take
/// equally long.
pub const TINY: usize = 1 << 10;

pub fn time(seconds: f64) -> String {
    match seconds {
        short if short < 1e-3 => format!("{:.1} us", short * 1e6),
        middle if middle < 1.0 => format!("{:.2} ms", middle * 1e3),
        long => format!("{long:.2} s"),
    }
}

pub fn bytes(bytes: usize) -> String {
    match bytes {
        whole if whole >= 1 << 20 && whole % (1 << 20) == 0 => format!("{} MiB", whole >> 20),
        whole if whole >= 1 << 10 && whole % (1 << 10) == 0 => format!("{} KiB", whole >> 10),
        odd => format!("{odd} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::{gbps, runs};

    #[test]
    fn the_ranks_of_a_host_are_listed_in_runs() {
        assert_eq!(runs(&[3]), "rank 3");
        assert_eq!(runs(&[0, 1, 2, 8]), "ranks 0-2, 8");
        assert_eq!(runs(&(0..40).step_by(2).collect::<Vec<_>>()), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... 20 ranks");
    }

    #[test]
    fn bandwidths_have_three_digits() {
        let texts = [1.234, 9.996, 45.67, 99.96, 1234.5].map(gbps);
        assert_eq!(texts, ["1.23", "10.0", "45.7", "100", "1234"]);
        let slow = [0.0, 0.000_061_27, 0.004, 0.012_345, 0.099_96].map(gbps);
        assert_eq!(slow, ["0.00", "0.0000613", "0.00400", "0.0123", "0.100"]);
    }
}
