//! `devicemesh why` with files that are no recordings, or not yet.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use recording::{Recorder, WorldFacts, layout};

fn tool(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    command.arg("why").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A new folder of that name.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The recording of a rank that has joined a world.
fn recorded() -> Vec<u8> {
    let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
    let world = WorldFacts { key: 7, rank: 0, size: 2, job: "train", store: "", launcher: "devicemesh run" };
    Recorder::new(words, 100, "elsewhere", "0.2.0").open_world(&world);
    words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect()
}

/// A tool that is killed with the test.
struct Watch(Child);

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_watch_survives_a_file_that_is_half_written() {
    let folder = folder("half-written");
    let (file, whole) = (folder.join("elsewhere-100-1.dmrec"), recorded());
    fs::write(&file, &whole).unwrap();
    let folder = folder.to_str().unwrap();
    let mut child = Watch(tool(&["--watch=0.02", folder]).spawn().unwrap());
    let (mut answers, mut answer) = (BufReader::new(child.0.stdout.take().unwrap()), String::new());
    answers.read_line(&mut answer).unwrap();
    assert!(answer.starts_with("train: "), "{answer}");
    fs::write(&file, &whole[..100]).unwrap();
    let mut warnings = BufReader::new(child.0.stderr.take().unwrap()).lines();
    for look in 0..2 {
        let warning = warnings.next().transpose().unwrap().unwrap_or_default();
        assert!(warning.contains("elsewhere-100-1.dmrec"), "look {look}: {warning:?}");
    }
}

#[test]
fn a_file_that_cannot_be_read_keeps_nobody_from_the_jobs_that_run() {
    let folder = folder("unreadable");
    fs::write(folder.join("elsewhere-100-1.dmrec"), "half").unwrap();
    let folder = folder.to_str().unwrap();
    let said = |arguments: &[&str]| {
        let output = tool(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, alone) = said(&[folder]);
    assert!(code == Some(3) && alone.starts_with("devicemesh why: cannot read "), "{alone}");
    let (code, with_name) = said(&[folder, "no-such-job", "--timeout", "0"]);
    assert!(code == Some(3) && with_name.contains("elsewhere-100-1.dmrec"), "{with_name}");
    assert!(with_name.contains("no job and no process \"no-such-job\""), "{with_name}");
}
