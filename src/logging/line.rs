//! One line of the log on stderr: time, name of the library, level and text.

use std::time::{SystemTime, UNIX_EPOCH};

use log::Level;

/// The longest line in bytes, with its newline. The kernel writes so many bytes to a pipe at once
/// (PIPE_BUF), so the lines of ranks that share a pipe do not mix.
const LONGEST: usize = 4096;

/// Stands at the end of a line that was cut.
const CUT: &[u8] = b"...";

/// Returns the line of a record: `2026-11-22T09:30:01.123Z devicemesh info rank 3: text`.
pub(super) fn line(now: SystemTime, level: Level, text: &str) -> Vec<u8> {
    let mut line = format!("{} devicemesh {} {text}", utc(now), name(level)).into_bytes();
    if line.len() >= LONGEST {
        let mut end = LONGEST - 1 - CUT.len();
        // A character is kept whole or dropped: the bytes after its first one begin with 10.
        while line[end] & 0xc0 == 0x80 {
            end -= 1;
        }
        line.truncate(end);
        line.extend_from_slice(CUT);
    }
    line.push(b'\n');
    line
}

/// The name of a level in lines and in `DM_LOG`.
fn name(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug | Level::Trace => "debug",
    }
}

/// The time in UTC with milliseconds, as ISO 8601 writes it: `2026-11-22T09:30:01.123Z`. The
/// lines of the log and the lines of `devicemesh run --timestamps` begin with this time.
pub fn utc(now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

/// The date that is so many days after 1970-01-01, in the Gregorian calendar.
fn date(mut days: u64) -> (u64, u64, u64) {
    // Every 400 years have equally many days.
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_OF_400_YEARS * 400;
    days %= DAYS_OF_400_YEARS;
    let is_leap = |year: u64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_those_of_date_utc() {
        let at = |seconds, millis| utc(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 999), "2000-02-28T23:59:59.999Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_795_344_861, 7), "2026-11-22T10:54:21.007Z");
        assert_eq!(at(4_107_542_399, 0), "2100-02-28T23:59:59.000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn a_line_fits_into_one_write_to_a_pipe() {
        let short = line(UNIX_EPOCH, Level::Warn, "rank 3: text");
        assert_eq!(short, b"1970-01-01T00:00:00.000Z devicemesh warn rank 3: text\n");
        for length in 4000..4110 {
            let long = line(UNIX_EPOCH, Level::Info, &"\u{e9}".repeat(length));
            assert!(long.len() <= LONGEST && long.ends_with(b"...\n"), "{length}");
            assert!(std::str::from_utf8(&long).is_ok(), "{length}");
        }
    }
}
