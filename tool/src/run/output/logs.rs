//! The files to which the ranks' output goes: a new folder for each run, and in it two files for
//! each rank, which may be cut by size.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::route::Rotation;

/// The link to the folder of the newest run.
const LATEST: &str = "latest";

/// A write of this many bytes fails if the file system is full.
const BLOCK: usize = 4096;

/// The folder of one run.
pub struct Folder(PathBuf);

/// One output of one rank in a file.
pub struct Log {
    path: PathBuf,
    file: File,
    /// The number of bytes in the file.
    length: u64,
    /// The limit on that number, where there is one.
    rotation: Option<Rotation>,
    /// Whether the file ends inside a line, because the tool passes on a long line in parts.
    is_inside_line: bool,
}

impl Folder {
    /// Makes the folder of the run of that name in `logs`. The folder may exist, because the nodes
    /// of a job may share a file system. Returns a remark for the user, too, where the link to the
    /// newest run cannot be made.
    pub fn make(logs: &Path, run: &str) -> Result<(Folder, Option<String>), String> {
        let folder = logs.join(run);
        fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        // A link cannot be replaced in one step, but another file can take its name. The link's
        // first name belongs to this process alone. The link is a convenience, and some file
        // systems have none, so its failure ends nothing.
        let latest = logs.join(LATEST);
        if fs::symlink_metadata(&latest).is_ok_and(|found| !found.is_symlink()) {
            let path = latest.display();
            let remark = format!("{path} is no symbolic link, so it stays as it is and does not lead to this run");
            return Ok((Folder(folder), Some(remark)));
        }
        let fresh = folder.join(format!(".{LATEST}-{}", std::process::id()));
        let _ = symlink(run, &fresh).and_then(|()| fs::rename(&fresh, latest));
        Ok((Folder(folder), None))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The file of one output of a rank that was started again that many times.
    pub fn log(&self, rank: u32, restarts: u32, is_error: bool) -> PathBuf {
        let restart = if restarts == 0 { String::new() } else { format!(".restart-{restarts}") };
        self.0.join(format!("rank-{rank}{restart}.{}", if is_error { "err" } else { "out" }))
    }

    /// Fails where the file system is full, or this user's part of it. Other errors say nothing
    /// about the logs, which were open before: the user may have moved the folder, for example.
    pub fn has_room(&self) -> io::Result<()> {
        let path = self.0.join(format!(".room-{}", std::process::id()));
        // In a folder where others may write, a link of this name may lead anywhere.
        let written = fresh(&path).and_then(|mut file| file.write_all(&[0; BLOCK]));
        let _ = fs::remove_file(path);
        let is_full = |error: &io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        written.or_else(|error| if is_full(&error) { Err(error) } else { Ok(()) })
    }

    /// Makes the file of one output of a rank. An existing file is an error, because it is from
    /// another run.
    pub fn create(&self, rank: u32, restarts: u32, is_error: bool) -> io::Result<File> {
        let path = self.log(rank, restarts, is_error);
        fresh(&path).map_err(|error| io::Error::other(format!("cannot write {}: {error}", path.display())))
    }
}

/// Makes a file to append to, so that several processes of a rank can write to it.
fn fresh(path: &Path) -> io::Result<File> {
    File::options().append(true).create_new(true).open(path)
}

impl Log {
    pub fn new(path: PathBuf, file: File, rotation: Option<Rotation>) -> Log {
        Log { path, file, length: 0, rotation, is_inside_line: false }
    }

    /// Writes whole lines, or a part of a line that is longer than the tool keeps. Begins a new
    /// file where the lines do not fit.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        self.write_parts(&mut bytes).map_err(|error| format!("cannot write {}: {error}", self.path.display()))
    }

    fn write_parts(&mut self, bytes: &mut &[u8]) -> io::Result<()> {
        let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
        let ends_line = bytes.last().is_some_and(is_end);
        if std::mem::replace(&mut self.is_inside_line, !ends_line) {
            // All parts of a line are in one file.
            self.append(bytes, bytes.iter().position(is_end).map_or(bytes.len(), |at| at + 1))?;
        }
        while let Some(rotation) = self.rotation.filter(|rotation| self.length + bytes.len() as u64 > rotation.size) {
            let room = rotation.size.saturating_sub(self.length) as usize;
            match bytes[..room].iter().rposition(is_end) {
                Some(at) => self.append(bytes, at + 1)?,
                None if self.length > 0 => {}
                // The line is longer than a file may be. It gets a file of its own.
                None => self.append(bytes, bytes.iter().position(is_end).map_or(bytes.len(), |at| at + 1))?,
            }
            if bytes.is_empty() {
                return Ok(());
            }
            self.rotate(rotation.keep)?;
        }
        self.append(bytes, bytes.len())
    }

    /// Writes the first `count` bytes.
    fn append(&mut self, bytes: &mut &[u8], count: usize) -> io::Result<()> {
        self.file.write_all(&bytes[..count])?;
        self.length += count as u64;
        *bytes = &bytes[count..];
        Ok(())
    }

    /// Gives the file the name of the newest older one, and begins a new file.
    fn rotate(&mut self, keep: u32) -> io::Result<()> {
        let older = |number: u32| PathBuf::from(format!("{}.{number}", self.path.display()));
        // A file may be missing because it was not made yet, or because somebody has removed or
        // renamed it. The ranks' output goes on in both cases.
        let rename = |from: &Path, to: PathBuf| match fs::rename(from, to) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        for number in (1..keep).rev() {
            rename(&older(number), older(number + 1))?;
        }
        rename(&self.path, older(1))?;
        self.file = fresh(&self.path)?;
        self.length = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_somebody_has_removed_is_made_again() {
        let path = std::env::temp_dir().join(format!("dm-removed-log-{}.out", std::process::id()));
        let rotation = Rotation { size: 8, keep: 2 };
        let mut log = Log::new(path.clone(), fresh(&path).unwrap(), Some(rotation));
        log.write(b"first\n").unwrap();
        fs::remove_file(&path).unwrap();
        log.write(b"second\n").unwrap();
        let written = fs::read(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(written.unwrap(), b"second\n");
    }
}
