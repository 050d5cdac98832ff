//! Where the recording of a process is, and how a reader finds it there.

use std::ffi::CStr;
use std::fs::{self, DirEntry, File};
use std::os::unix::fs::PermissionsExt;
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

/// The recordings that a process writes, each with its path where it has one. A forked child may
/// have its parent's. A process that only reads recordings, such as another `devicemesh why`, has
/// none: the permissions of the links in /proc tell whether a descriptor was opened for writing.
pub fn recordings_of(pid: u32) -> impl Iterator<Item = (Option<PathBuf>, File)> {
    let anonymous = format!("/memfd:{}", NAME.to_string_lossy());
    let recording = move |entry: DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let is_file = is_recording(&target);
        let is_wanted = is_file || target.to_string_lossy().starts_with(&anonymous);
        let is_written = is_wanted && entry.metadata().is_ok_and(|link| link.permissions().mode() & 0o200 != 0);
        let file = is_written.then(|| File::open(entry.path()))?.ok()?;
        Some((is_file.then_some(target), file))
    };
    // The list is complete before the first file is opened. Otherwise two readers that look at each
    // other would open each other's descriptors without end.
    let list = |folder: &Path| -> Vec<DirEntry> {
        fs::read_dir(folder.join("fd")).into_iter().flatten().filter_map(Result::ok).collect()
    };
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let mut entries = list(&folder);
    if entries.is_empty() {
        // When the main thread has ended alone, by pthread_exit, only the other threads have
        // descriptors.
        let threads = fs::read_dir(folder.join("task")).into_iter().flatten().filter_map(Result::ok);
        entries = threads.map(|thread| list(&thread.path())).find(|entries| !entries.is_empty()).unwrap_or_default();
    }
    entries.into_iter().filter_map(recording)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::process::id;

    use super::{EXTENSION, file_name, is_recording, recordings_of};

    #[test]
    fn names_are_plain_and_tell_copies_apart() {
        assert_eq!(file_name("alpha", 4711, 99, 1), "alpha-4711-99.dmrec");
        assert_eq!(file_name("a/b c.net", 4711, 99, 2), "a_b_c.net-4711-99-2.dmrec");
        assert!(is_recording("traces/alpha-4711-99.dmrec".as_ref()) && !is_recording("traces/notes".as_ref()));
    }

    /// Two tools that look at once would otherwise open each other's descriptors without end.
    #[test]
    fn a_reader_has_no_recordings() {
        let path = std::env::temp_dir().join(format!("here-{}-1.{EXTENSION}", id()));
        let written = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        let read = File::open(&path).unwrap();
        let found: Vec<_> = recordings_of(id()).filter(|(at, _)| at.as_deref() == Some(&path)).collect();
        fs::remove_file(&path).unwrap();
        assert_eq!(found.len(), 1, "{written:?} is one, and {read:?} is none");
    }
}
