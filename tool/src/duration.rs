//! Reads the times of the command line.

use std::time::Duration;

/// Every time is shorter than this number of seconds, about 30 years, so that adding it to a moment
/// cannot overflow.
const LONGEST: f64 = 1e9;

/// Reads a time as timeout(1) does: a number of seconds, or a number with the unit s, m, h or d. A
/// sum of those is written as 1h30m.
pub fn duration(text: &str) -> Result<Duration, String> {
    match seconds(text) {
        Some(seconds) if (0.0..LONGEST).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        Some(seconds) if seconds >= LONGEST && seconds.is_finite() => {
            Err(format!("too long: the longest time is {}d", (LONGEST / 86_400.0).floor()))
        }
        _ => Err("not a time: seconds, or 90s, 10m, 2h, 1d, 1h30m".to_owned()),
    }
}

/// Reads a time that must not be 0, because nobody wants a job that ends at once or a look without
/// a pause.
pub fn limit(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("0 is too short: give a longer time, or leave the option out".to_owned()),
        limit => Ok(limit),
    }
}

fn seconds(text: &str) -> Option<f64> {
    if !text.ends_with(|c: char| c.is_ascii_alphabetic()) {
        return text.parse().ok();
    }
    let part = |part: &str| {
        let at = part.len() - 1;
        let unit = match &part[at..] {
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return None,
        };
        part[..at].parse::<f64>().ok().filter(|number| *number >= 0.0).map(|number| number * unit)
    };
    text.split_inclusive(|c: char| c.is_ascii_alphabetic()).map(part).sum()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{duration, limit};

    #[test]
    fn times_have_units() {
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        for wrong in ["", "m", "-1", "-1m", "nan", "inf", "1w", "5 x", "2µ", "1h30", "1hm", "µs"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        for long in ["1000000d", "1e9", "300000h"] {
            assert_eq!(duration(long).unwrap_err(), "too long: the longest time is 11574d", "{long}");
        }
        assert!(duration("11574d").is_ok());
        assert!(limit("0").is_err() && limit("0s").is_err() && limit("0.1").is_ok());
    }
}
