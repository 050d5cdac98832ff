//! Where the recording of a process is, and how a reader finds it there.

use std::ffi::CStr;
use std::fs::{self, DirEntry, File};
use std::path::{Path, PathBuf};

/// The name of a recording in anonymous memory (memfd).
pub const NAME: &CStr = c"devicemesh-recording";
/// The end of the name of a recording in a file.
pub const EXTENSION: &str = "dmrec";

/// The name of the file with a process's recording: `HOST-PID-START.dmrec`. A process with two
/// copies of the library has two recordings, and the second one is `HOST-PID-START-2.dmrec`.
/// Letters of the host's name that do not belong in the name of a file become `_`.
pub fn file_name(host: &str, pid: u32, start: u64, copy: u32) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_' | '-');
    let host: String = host.chars().map(|letter| if is_plain(letter) { letter } else { '_' }).collect();
    match copy {
        ..=1 => format!("{host}-{pid}-{start}.{EXTENSION}"),
        copy => format!("{host}-{pid}-{start}-{copy}.{EXTENSION}"),
    }
}

/// Whether a file has the name of a recording.
pub fn is_recording(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == EXTENSION)
}

/// The recordings that a process has open, each with its path where it has one. A forked child may
/// have its parent's.
pub fn recordings_of(pid: u32) -> impl Iterator<Item = (Option<PathBuf>, File)> {
    let anonymous = format!("/memfd:{}", NAME.to_string_lossy());
    let recording = move |entry: DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let is_file = is_recording(&target);
        let is_wanted = is_file || target.to_string_lossy().starts_with(&anonymous);
        let file = is_wanted.then(|| File::open(entry.path()))?.ok()?;
        Some((is_file.then_some(target), file))
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
    // The list is complete before the first file is opened. Otherwise two readers that look at each
    // other would open each other's descriptors without end.
    let entries: Vec<DirEntry> = entries.filter_map(Result::ok).collect();
    entries.into_iter().filter_map(recording)
}

#[cfg(test)]
mod tests {
    use super::{file_name, is_recording};

    #[test]
    fn names_are_plain_and_tell_copies_apart() {
        assert_eq!(file_name("alpha", 4711, 99, 1), "alpha-4711-99.dmrec");
        assert_eq!(file_name("a/b c.net", 4711, 99, 2), "a_b_c.net-4711-99-2.dmrec");
        assert!(is_recording("traces/alpha-4711-99.dmrec".as_ref()) && !is_recording("traces/notes".as_ref()));
    }
}
