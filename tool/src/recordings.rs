//! Finds and reads recordings.

use std::fs::{File, read_dir};
use std::path::{Path, PathBuf};

use recording::Snapshot;

use crate::failure::Failure;

/// The end of the names of recordings in files.
const SUFFIX: &str = "dmrec";

/// Reads the recordings in these files and folders. Fails where there is none, and where a file
/// that was named is no recording.
pub fn read_files(paths: &[PathBuf]) -> Result<Vec<Snapshot>, Failure> {
    let mut snapshots = Vec::new();
    for path in paths {
        if !path.is_dir() {
            snapshots.push(read(path)?);
            continue;
        }
        let entries = read_dir(path).map_err(|error| cannot_read(path, &error))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|suffix| suffix == SUFFIX));
        files.sort();
        for file in files {
            snapshots.push(read(&file)?);
        }
    }
    match snapshots.is_empty() {
        false => Ok(snapshots),
        true => {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            let said = format!(
                "no recording (*.{SUFFIX}) in {}: set DM_TRACE_DIR to a folder for the processes of the job",
                names.join(", ")
            );
            Err(Failure::new(1, said))
        }
    }
}

fn read(path: &Path) -> Result<Snapshot, Failure> {
    let file = File::open(path).map_err(|error| cannot_read(path, &error))?;
    Snapshot::of_file(&file).map_err(|error| cannot_read(path, &error))
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(1, format!("cannot read {}: {error}", path.display()))
}
