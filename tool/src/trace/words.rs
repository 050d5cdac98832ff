//! Amounts as the tables of a trace write them.

/// A size with at most three digits before the unit: "512 B", "4 KiB", "1.5 MiB".
pub fn size(bytes: u64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        None => format!("{bytes} B"),
        Some((unit, name)) if bytes % unit == 0 => format!("{} {name}", bytes / unit),
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
    }
}

/// A time in nanoseconds, with a unit that suits it.
pub fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        short if short < 1e6 => format!("{:.1} us", short / 1e3),
        middle if middle < 1e9 => format!("{:.1} ms", middle / 1e6),
        long => format!("{:.2} s", long / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::{size, time};

    #[test]
    fn amounts_are_short() {
        let sizes = [(0, "0 B"), (1023, "1023 B"), (4096, "4 KiB"), (3 << 19, "1.5 MiB"), (1 << 31, "2 GiB")];
        sizes.iter().for_each(|(bytes, text)| assert_eq!(size(*bytes), *text));
        let times = [(1500.0, "1.5 us"), (2.5e6, "2.5 ms"), (12e9, "12.00 s")];
        times.iter().for_each(|(nanoseconds, text)| assert_eq!(time(*nanoseconds), *text));
    }
}
