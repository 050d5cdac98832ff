//! Finds in the last lines of a rank the reason of its failure.

use std::fmt;

use crate::words::cut;

/// The largest number of characters of a reason, so that a terminal shows the tool's last line
/// whole and a pipe takes it in one write.
const LONGEST: usize = 500;

/// The first line of a Python traceback.
const TRACEBACK: &str = "Traceback (most recent call last):";

/// Stands before the traceback of an exception that Python could not pass on.
const IGNORED: &str = "Exception ignored";

/// Stands before the place of a panic of a Rust program.
const PANICKED: &str = " panicked at ";

/// Stands before the message of an exception of C++.
const WHAT: &str = "what():";

/// Words in lower case. A line that reports an error has one of them.
const WRONG: [&str; 21] = [
    "memory allocation of",
    "error:",
    "error]",
    "[error",
    "fatal:",
    "fatal error",
    "fatal]",
    "[fatal",
    "panic:",
    "exception:",
    "dm_status_",
    "assertion `",
    "segmentation fault",
    "bus error",
    "core dumped",
    "out of memory",
    "not found",
    "no such file",
    "permission denied",
    "undefined symbol",
    "symbol lookup",
];

/// The reason why a rank failed, which comes from what it wrote. The reason is shown at the end of
/// the line that reports the exit code.
pub enum Reason {
    /// The error that the rank reported.
    Error(String),
    /// Its last line, where no line is an error.
    LastLine(String),
}

impl Reason {
    /// The words that the rank wrote.
    pub fn text(&self) -> &str {
        match self {
            Reason::Error(text) | Reason::LastLine(text) => text,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Error(text) => write!(f, ": {text}"),
            Reason::LastLine(text) => write!(f, "; its last line: {text}"),
        }
    }
}

/// Finds why a rank failed. `None` where it wrote nothing but progress.
pub fn reason(lines: &[String]) -> Option<Reason> {
    let lines: Vec<&str> = lines.iter().map(|line| without_rank(line)).collect();
    if let Some(error) = (0..lines.len()).rev().find_map(|at| error_at(&lines, at)) {
        return Some(Reason::Error(cut(&error, LONGEST)));
    }
    let last = lines.iter().map(|line| line.trim()).rfind(|line| !line.is_empty() && !is_progress(line));
    last.map(|line| Reason::LastLine(cut(line, LONGEST)))
}

/// A line without the `[rank3]: ` that PyTorch writes before each line of a traceback.
fn without_rank(line: &str) -> &str {
    let rest = line.strip_prefix("[rank").map(|rest| rest.trim_start_matches(|digit: char| digit.is_ascii_digit()));
    rest.and_then(|rest| rest.strip_prefix("]: ")).unwrap_or(line)
}

/// The error that line `at` reports, with what other lines say about it.
fn error_at(lines: &[&str], at: usize) -> Option<String> {
    let line = lines[at].trim();
    let next = lines.get(at + 1).map(|line| line.trim());
    let before = if at > 0 { lines[at - 1] } else { "" };
    if line == TRACEBACK {
        // Python could not pass this exception on, so it is not the one that ended the program.
        let exception = lines[at + 1..].iter().find(|line| !is_indented(line));
        return exception.filter(|_| !before.contains(IGNORED)).map(|line| line.trim().to_owned());
    }
    // A Rust program writes the message in the next line, and before Rust 1.73 in the same one.
    if let Some((_, place)) = line.split_once(PANICKED) {
        return match place.strip_suffix(':').zip(next) {
            Some((place, message)) => Some(format!("panicked at {place}: {message}")),
            None => Some(format!("panicked at {place}")),
        };
    }
    // A C++ program that throws writes the exception's type first.
    if let Some((_, thrown)) = line.split_once("terminate called after throwing an instance of ") {
        let thrown = thrown.trim_matches('\'');
        let what = next.and_then(|line| line.strip_prefix(WHAT)).map(str::trim);
        return Some(what.map_or(thrown.to_owned(), |what| format!("{thrown}: {what}")));
    }
    if before.contains(PANICKED) || (line.starts_with(WHAT) && at > 0) {
        return error_at(lines, at - 1);
    }
    (is_wrong(line) && !is_progress(line) && !is_ignored(lines, at)).then(|| line.to_owned())
}

/// Whether line `at` belongs to an exception that Python could not pass on.
fn is_ignored(lines: &[&str], at: usize) -> bool {
    let from = lines[..at].iter().rposition(|line| line.contains(TRACEBACK));
    let Some(from) = from.filter(|from| *from > 0 && lines[from - 1].contains(IGNORED)) else {
        return false;
    };
    // The exception is the first line after the traceback that is not indented.
    lines[from + 1..at].iter().all(|line| is_indented(line))
}

fn is_indented(line: &str) -> bool {
    line.starts_with([' ', '\t'])
}

/// Whether a line reports an error.
fn is_wrong(line: &str) -> bool {
    let small = line.to_lowercase();
    if words(line).any(|word| matches!(word, "DEBUG" | "INFO" | "WARNING")) || small.contains("warning:") {
        return false;
    }
    let is_measured = |word: &str| {
        // "validation error: 0.12" is a measurement.
        word == "error:" && small.split(word).nth(1).is_some_and(starts_with_number)
    };
    WRONG.iter().any(|word| small.contains(word) && !is_measured(word))
        || is_exception(line)
        || words(line).any(|word| matches!(word, "ERROR" | "FATAL" | "CRITICAL"))
}

/// The words of a line, without what stands between them.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|character: char| !character.is_alphanumeric() && character != '_')
}

/// Whether a line is an exception without a message: a name such as KeyboardInterrupt.
fn is_exception(line: &str) -> bool {
    let is_name = line.chars().all(|character| character.is_alphanumeric() || matches!(character, '_' | '.'));
    is_name && ["Error", "Exception", "Interrupt"].iter().any(|end| line.ends_with(end))
}

/// Whether a line is progress and no error.
fn is_progress(line: &str) -> bool {
    let small = line.to_lowercase();
    // Bars of tqdm, pip, curl and the like.
    let is_bar = ["%|", "it/s", "s/it", "[===", "[###", "━━━", "███"].iter().any(|part| small.contains(part));
    // A share of the work, alone or at the end: 100%
    let is_share = small.ends_with('%') && small.trim_end_matches('%').ends_with(|last: char| last.is_ascii_digit());
    // Step 12: loss 0.5
    let is_step = ["step", "epoch", "iter", "batch"].iter().any(|word| {
        let rest = small.trim_start_matches(['[', '(', ' ']).strip_prefix(word);
        rest.is_some_and(|rest| starts_with_number(rest.trim_start_matches(char::is_alphabetic)))
    });
    is_bar || is_share || is_step || is_counted(&small)
}

/// Whether a line begins with a count of steps, as "[3/12] ending the mesh", maybe behind the name
/// of a program.
fn is_counted(line: &str) -> bool {
    let Some((before, count)) = line.split_once('[') else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (before.is_empty() || before.ends_with(": "))
        && count
            .split_once(']')
            .and_then(|(count, _)| count.split_once('/'))
            .is_some_and(|(done, all)| is_number(done) && is_number(all))
}

/// Whether a number comes first, after signs and blanks.
fn starts_with_number(text: &str) -> bool {
    let text = text.trim_start_matches([' ', ':', '=', '[', '(', '#', '+', '-', '.']);
    text.starts_with(|first: char| first.is_ascii_digit()) || text.starts_with("nan") || text.starts_with("inf")
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, reason};

    fn of(text: &str) -> String {
        let reason = reason(&text.lines().map(str::to_owned).collect::<Vec<_>>());
        reason.map_or(String::new(), |reason| reason.to_string())
    }

    #[test]
    fn the_reason_is_the_last_error() {
        for (text, expected) in [
            // Python
            (
                "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\n    f()\nValueError: loss is nan",
                ": ValueError: loss is nan",
            ),
            (
                "[rank3]: Traceback (most recent call last):\n[rank3]:   File \"t.py\", line 3\n[rank3]: torch.OutOfMemoryError: CUDA out of memory.",
                ": torch.OutOfMemoryError: CUDA out of memory.",
            ),
            (
                "Traceback (most recent call last):\n  f()\nRuntimeError: CUDA error: device-side assert\nCUDA kernel errors might be reported later\nCompile with TORCH_USE_CUDA_DSA",
                ": RuntimeError: CUDA error: device-side assert",
            ),
            (
                "Traceback (most recent call last):\n  f()\nKeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  g()\nValueError: b",
                ": ValueError: b",
            ),
            (
                "Traceback (most recent call last):\n  f()\nValueError: a\nException ignored in: <function T.__del__>\nTraceback (most recent call last):\n  g()\nTypeError: b",
                ": ValueError: a",
            ),
            ("Traceback (most recent call last):\n  f()\nKeyboardInterrupt", ": KeyboardInterrupt"),
            (
                "  File \"t.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was never closed",
                ": SyntaxError: '(' was never closed",
            ),
            ("train.py: error: unrecognized arguments: --lr", ": train.py: error: unrecognized arguments: --lr"),
            // Rust, C++, C, Go, sanitizers, shells, loaders
            (
                "thread 'main' (12) panicked at src/main.rs:5:10:\nno data\nnote: run with `RUST_BACKTRACE=1`",
                ": panicked at src/main.rs:5:10: no data",
            ),
            ("thread 'main' panicked at 'no data', src/main.rs:5:10", ": panicked at 'no data', src/main.rs:5:10"),
            (
                "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no data",
                ": std::runtime_error: no data",
            ),
            ("t: t.c:4: main: Assertion `n > 0' failed.", ": t: t.c:4: main: Assertion `n > 0' failed."),
            (
                "memory allocation of 352 bytes failed\nnote: run with `RUST_BACKTRACE=1`",
                ": memory allocation of 352 bytes failed",
            ),
            ("panic: no data\n\ngoroutine 1 [running]:\nmain.main()\n\t/t.go:4 +0x1d", ": panic: no data"),
            (
                "==7==ERROR: AddressSanitizer: heap-use-after-free on 0x1\n    #0 0x2 in main t.c:4",
                ": ==7==ERROR: AddressSanitizer: heap-use-after-free on 0x1",
            ),
            ("sh: 1: trian: not found", ": sh: 1: trian: not found"),
            (
                "./t: error while loading shared libraries: libx.so: cannot open shared object file: No such file or directory",
                ": ./t: error while loading shared libraries: libx.so: cannot open shared object file: No such file or directory",
            ),
            // this library
            (
                "dm_init: DM_STATUS_PEER_LOST: rank 2 was lost\nleaving",
                ": dm_init: DM_STATUS_PEER_LOST: rank 2 was lost",
            ),
            // logs
            ("2026-11-23 ERROR train: disk full\n2026-11-23 INFO bye", ": 2026-11-23 ERROR train: disk full"),
            // Progress after the error, and measurements that look like one.
            ("fatal: no data\n 45%|████▌     | 9/20 [00:01<00:01,  8.5it/s]\nstep 12: loss 0.5", ": fatal: no data"),
            ("oops\nvalidation error: 0.12\nepoch 3/10", "; its last line: validation error: 0.12"),
            (
                "INFO cache not found\ntrain.py:3: UserWarning: error: none\nDeprecationWarning: error: x\ngiving up",
                "; its last line: giving up",
            ),
            // No error
            ("loss is nan", "; its last line: loss is nan"),
            ("giving up\nStep 12 | loss 0.5\nIteration [3/9]\n 99%", "; its last line: giving up"),
            (" 45%|████▌     | 9/20 [00:01<00:01,  8.5it/s]", ""),
            (
                "rank 2 is slow\n[11/12] measuring\ndevicemesh check: [12/12] ending the mesh",
                "; its last line: rank 2 is slow",
            ),
            ("v[1/2] is nan\n[rank] bye", "; its last line: [rank] bye"),
            ("", ""),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn a_long_reason_is_cut() {
        let shown = of(&format!("fatal: {}", "ä".repeat(2 * LONGEST)));
        assert_eq!((shown.chars().count(), shown.ends_with("ä...")), (LONGEST + 5, true));
    }
}
