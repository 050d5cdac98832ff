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

/// Reads the recordings in these files and folders. Fails where a file is no recording.
pub fn read_files(paths: &[PathBuf]) -> Result<Vec<Snapshot>, Failure> {
    let failed = |message| Failure::new(1, message);
    let read = |path: PathBuf| {
        let snapshot = open(&path).and_then(|file| Snapshot::of_file(&file));
        snapshot.map_err(|error| failed(cannot_read(&path, &error)))
    };
    files(paths).map_err(failed)?.into_iter().map(read).collect()
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
