//! Where the recording of a process is, and how a reader finds it there.

use std::ffi::CStr;
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The name of a recording in anonymous memory (memfd).
pub const NAME: &CStr = c"devicemesh-recording";
/// The end of the name of a recording in a file.
pub const EXTENSION: &str = "dmrec";
/// The most recordings of one process. A process with two copies of the library has two, but a
/// process may have any number of such files open, and each one takes time and memory.
const MOST: usize = 16;
/// The words that the kernel puts behind the path of a file that was removed, in /proc.
const REMOVED: &str = " (deleted)";

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
    try_recordings_of(pid).filter_map(Result::ok)
}

/// The recordings that a process writes, as [`recordings_of`] gives them. An item is an error where
/// a recording cannot be opened, or where this process has too many open files to look for any. A
/// process that has ended or that this user may not look at has no items.
pub fn try_recordings_of(pid: u32) -> impl Iterator<Item = io::Result<(Option<PathBuf>, File)>> {
    let anonymous = format!("/memfd:{}", NAME.to_string_lossy());
    let recording = move |entry: DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let (is_file, name) = (is_recording(&target), target.to_string_lossy());
        // The process also writes to a file that somebody has removed, which has no path any more.
        let is_removed = name.strip_suffix(REMOVED).is_some_and(|name| is_recording(name.as_ref()));
        let is_wanted = is_file || is_removed || name.starts_with(&anonymous);
        let is_written = is_wanted && entry.metadata().is_ok_and(|link| link.permissions().mode() & 0o200 != 0);
        match is_written.then(|| open(&entry.path()))? {
            // The process has closed the file meanwhile, or has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            file => Some(file.map(|file| (is_file.then_some(target), file))),
        }
    };
    // The list is complete before the first file is opened. Otherwise two readers that look at each
    // other would open each other's descriptors without end.
    let mut shortage = None;
    let mut entries_of = |folder: PathBuf| -> Vec<DirEntry> {
        let listed = fs::read_dir(folder).map_err(|error| shortage = Some(error).filter(is_shortage));
        listed.into_iter().flatten().filter_map(Result::ok).collect()
    };
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let mut entries = entries_of(folder.join("fd"));
    if entries.is_empty() {
        // When the main thread has ended alone, by pthread_exit, only the other threads have
        // descriptors.
        let threads = entries_of(folder.join("task"));
        let mut entries_of_threads = threads.iter().map(|thread| entries_of(thread.path().join("fd")));
        entries = entries_of_threads.find(|entries| !entries.is_empty()).unwrap_or_default();
    }
    let shortage = shortage.filter(|_| entries.is_empty());
    entries.into_iter().filter_map(recording).take(MOST).chain(shortage.map(Err))
}

/// Whether an error says that this process, or the whole host, has too many open files.
fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Opens a file that another process has open. That process may be another user's. So the file may
/// be a named pipe, or a file with a lease (fcntl(2)), for which an ordinary `open` would wait.
fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;
    use std::process::id;

    use super::{EXTENSION, file_name, is_recording, recordings_of};

    #[test]
    fn names_are_plain_and_tell_copies_apart() {
        assert_eq!(file_name("alpha", 4711, 99, 1), "alpha-4711-99.dmrec");
        assert_eq!(file_name("a/b c.net", 4711, 99, 2), "a_b_c.net-4711-99-2.dmrec");
        assert!(is_recording("traces/alpha-4711-99.dmrec".as_ref()) && !is_recording("traces/notes".as_ref()));
    }

    #[test]
    fn a_named_pipe_is_no_recording() {
        let path = std::env::temp_dir().join(format!("pipe-{}-1.{EXTENSION}", id()));
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        // Opened for both, a pipe needs no other process.
        let pipe = File::options().read(true).write(true).open(&path).unwrap();
        let found: Vec<_> = recordings_of(id()).filter_map(|(at, _)| at).collect();
        fs::remove_file(&path).unwrap();
        assert!(!found.contains(&path), "{pipe:?} was taken for a recording");
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

    #[test]
    fn a_recording_whose_file_was_removed_is_found() {
        let path = std::env::temp_dir().join(format!("removed-{}-1.{EXTENSION}", id()));
        let written = File::options().create(true).truncate(true).write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let file = |file: &File| file.metadata().map(|file| (file.dev(), file.ino())).unwrap();
        let found = recordings_of(id()).find(|(_, found)| file(found) == file(&written));
        assert!(found.is_some_and(|(path, _)| path.is_none()));
    }
}
