//! Records of checks: files with the JSON report, which `--save` writes and `--compare` reads.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use devicemesh::logging::utc;
use serde::Deserialize;

use super::report::{Report, SCHEMA};

/// The largest record that is read, in bytes. A report has some kilobytes for each rank.
const LARGEST: u64 = 1 << 30;

/// An earlier report, as far as it is compared. [`Report`] says what its fields mean.
#[derive(Deserialize)]
pub struct Record {
    /// Records of `--json` before 0.2.0 have no date.
    #[serde(default)]
    pub date: Option<String>,
    pub version: String,
    pub mesh: String,
    pub device_type: String,
    pub library: String,
    pub library_version: String,
    pub dtype: String,
    pub ranks_per_core: f64,
    pub hosts: Vec<Host>,
    pub dimensions: Vec<Dimension>,
    #[serde(default)]
    pub pairs: Vec<Pairs>,
}

#[derive(Deserialize)]
pub struct Host {
    pub name: String,
}

#[derive(Deserialize)]
pub struct Dimension {
    pub name: String,
    pub size: usize,
    pub groups: usize,
    pub measurements: Vec<Measurement>,
}

#[derive(Deserialize)]
pub struct Measurement {
    pub collective: String,
    pub bytes: usize,
    pub iterations: u32,
    pub seconds: f64,
    #[serde(default)]
    pub batch_seconds: Vec<f64>,
}

#[derive(Deserialize)]
pub struct Pairs {
    pub kind: String,
    pub bytes: usize,
    pub iterations: u32,
    pub seconds: f64,
    #[serde(default)]
    pub batch_seconds: Vec<f64>,
}

/// The field that is read first, because a file of another schema need not have the other fields
/// of a record.
#[derive(Deserialize)]
struct Head {
    schema: String,
    #[serde(default)]
    verdict: String,
}

/// Reads a record. The error says what is wrong with the file, and where.
pub fn read(file: &Path) -> Result<Record, String> {
    let wrong = |what: String| format!("--compare {}: {what}", file.display());
    let about = fs::metadata(file).map_err(|error| wrong(error.to_string()))?;
    if !about.is_file() {
        return Err(wrong("it is not a file".to_owned()));
    }
    if about.len() > LARGEST {
        return Err(wrong(format!("it has {} bytes, and a record has at most {LARGEST}", about.len())));
    }
    let text = fs::read(file).map_err(|error| wrong(error.to_string()))?;
    let unfit = |error: serde_json::Error| wrong(format!("it is no report of devicemesh check: {error}"));
    let head: Head = serde_json::from_slice(&text).map_err(unfit)?;
    if head.schema != SCHEMA {
        return Err(wrong(format!("its schema is {:?}, and this version reads {SCHEMA:?}", head.schema)));
    }
    if head.verdict == "error" {
        return Err(wrong("it is the report of a check that could not be made: it has no times".to_owned()));
    }
    let record: Record = serde_json::from_slice(&text).map_err(unfit)?;
    let measured = record.dimensions.iter().flat_map(|dimension| &dimension.measurements);
    let mut times = measured.map(|row| row.seconds).chain(record.pairs.iter().map(|row| row.seconds));
    match times.find(|seconds| !(*seconds > 0.0 && seconds.is_finite())) {
        Some(seconds) => Err(wrong(format!("it has a time of {seconds} seconds"))),
        None => Ok(record),
    }
}

/// Fails where [`save`] could not write the file. So the user learns this before a long check and
/// not after it.
pub fn check_place(file: &Path) -> Result<(), String> {
    if file.symlink_metadata().is_ok() {
        return Err(exists(file));
    }
    let (part, made) = part_of(file).map_err(|error| cannot(file, &error))?;
    drop(made);
    let _ = fs::remove_file(part);
    Ok(())
}

/// Writes the report. The file is there as a whole or not at all, and no other file is replaced.
pub fn save(file: &Path, report: &Report) -> Result<(), String> {
    let (part, mut made) = part_of(file).map_err(|error| cannot(file, &error))?;
    let written = made.write_all(report.json().as_bytes()).and_then(|()| made.sync_all());
    // The kernel refuses the link if a file has that name. Some file systems have no links.
    let named = written.and_then(|()| match fs::hard_link(&part, file) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists && file.symlink_metadata().is_err() => {
            fs::rename(&part, file)
        }
        linked => linked,
    });
    let _ = fs::remove_file(&part);
    named.map_err(|error| if error.kind() == ErrorKind::AlreadyExists { exists(file) } else { cannot(file, &error) })
}

/// Makes the file that becomes the record, beside it.
fn part_of(file: &Path) -> std::io::Result<(PathBuf, File)> {
    let mut name = file.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
    name.push(format!(".part-{}", std::process::id()));
    let part = file.with_file_name(name);
    let made = OpenOptions::new().write(true).create_new(true).open(&part)?;
    Ok((part, made))
}

fn exists(file: &Path) -> String {
    format!("--save {}: the file exists; name another one, for example with the date in it", file.display())
}

fn cannot(file: &Path, error: &std::io::Error) -> String {
    format!("--save {}: {error}", file.display())
}

/// The time now, as "2026-11-23T10:15:00Z".
pub fn now() -> String {
    date(SystemTime::now())
}

/// The time in whole seconds.
fn date(time: SystemTime) -> String {
    format!("{}Z", utc(time).split('.').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_795_392_000 + 3661), "2026-11-23T01:01:01Z");
    }
}
