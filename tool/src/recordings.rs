//! Finds and reads recordings in files.

use std::fs::{File, metadata, read_dir};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use recording::Snapshot;
use recording::clock::Clock;
use recording::place::{EXTENSION, is_recording};
use rustix::fs::OFlags;

use crate::failure::Failure;

/// The files that are named, and the recordings in the folders that are named, in the order of
/// their names. Fails with a message where a folder has none.
pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for path in paths {
        let cannot = |error| cannot_read(path, &error);
        if !metadata(path).map_err(cannot)?.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = read_dir(path).map_err(cannot)?.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<PathBuf> = entries.filter(|file| is_recording(file)).collect();
        if found.is_empty() {
            return Err(format!(
                "{} has no recordings: no file whose name ends in .{EXTENSION}; the processes of a job leave some with DM_TRACE_DIR={}",
                path.display(),
                path.display()
            ));
        }
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

/// Reads the recordings in these files and folders. `warn` gets a line for each file that is no
/// recording. Fails where no file is one.
pub fn read_files(paths: &[PathBuf], warn: impl Fn(&str)) -> Result<Vec<Snapshot>, Failure> {
    let failed = |message| Failure::new(1, message);
    let (mut snapshots, mut unreadable) = (Vec::new(), Vec::new());
    for path in files(paths).map_err(failed)? {
        match open(&path).and_then(|file| Snapshot::of_file(&file)) {
            Ok(snapshot) => snapshots.push(snapshot),
            Err(error) => unreadable.push(cannot_read(&path, &error)),
        }
    }
    let error = (snapshots.is_empty() && !unreadable.is_empty()).then(|| failed(unreadable.remove(0)));
    unreadable.iter().for_each(|line| warn(line));
    error.map_or(Ok(snapshots), Err)
}

/// Opens a file that may be a recording. Others may write in the folder, too, so it may be a named
/// pipe, for which an ordinary `open` would wait.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The nanoseconds of a tick on this host. It takes 2 ms.
pub fn length_of_tick() -> Option<f64> {
    let clock = Clock::of_this_machine();
    let before = clock.moment();
    sleep(Duration::from_millis(2));
    before.nanoseconds_per_tick(&clock.moment())
}

fn cannot_read(path: &Path, error: &io::Error) -> String {
    format!("cannot read {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use recording::{Recorder, layout};

    use super::*;

    #[test]
    fn a_file_that_is_no_recording_is_left_out_and_told() {
        let words: &'static [AtomicU64] = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let _ = Recorder::new(words, 7, "alpha", "0.2.0");
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        let folder = std::env::temp_dir().join(format!("dm-recordings-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in [("a", &b""[..]), ("b", &bytes), ("c", b"no recording")] {
            std::fs::write(folder.join(format!("{name}.{EXTENSION}")), text).unwrap();
        }
        let told = RefCell::new(Vec::new());
        let read = || read_files(std::slice::from_ref(&folder), |line| told.borrow_mut().push(line.to_owned()));
        let pids: Vec<u32> = read().ok().unwrap().iter().map(|snapshot| snapshot.process.pid).collect();
        let first = told.take();
        std::fs::remove_file(folder.join(format!("b.{EXTENSION}"))).unwrap();
        let failed = read().err().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(pids, [7]);
        assert!(first.len() == 2 && first[0].contains("a.dmrec: ") && first[1].contains("c.dmrec: "), "{first:?}");
        assert!(failed.code == 1 && failed.message.contains("a.dmrec: "), "{}", failed.message);
        assert!(told.take().iter().all(|line| line.contains("c.dmrec: ")));
    }
}
