//! A CUDA device and NCCL on a machine that has neither: tests/nccl/device.c, whose device memory
//! is the host's, and tests/nccl/recorder over libhostccl. A test runs itself again in a process
//! that finds them.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::cargo_build::shared_engine;

/// This variable is set in the process that has the stand-ins. Its value is the log of the device.
const LOG: &str = "CUDA_LOG";

/// Runs `body` in a process of its own with the stand-ins and these variables. `test` is the name
/// of the calling test, which is called again there.
pub fn with_device(test: &str, variables: &[(&str, &str)], body: impl FnOnce(&Path)) {
    if let Some(log) = std::env::var_os(LOG) {
        return body(Path::new(&log));
    }
    let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}.log", std::process::id()));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).envs(environment()).env(LOG, &log).envs(variables.iter().copied());
    let done = child.output().unwrap();
    let recorded = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    let output = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && output.contains("1 passed"), "{output}\nthe device's log:\n{recorded}");
}

/// Returns the environment that a process needs to find the stand-ins, which are built at the
/// first call.
pub fn environment() -> [(&'static str, PathBuf); 3] {
    static BUILT: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    let (folder, engine) = BUILT.get_or_init(|| (stand_ins(), shared_engine()));
    [
        ("LD_LIBRARY_PATH", folder.clone()),
        ("DM_CCL_LIBRARY", folder.join("libnccl.so.2")),
        ("RECORDER_HOST", engine.clone()),
    ]
}

/// The log of a device, by which the order of streams is followed.
pub struct Order {
    /// For each line that is a use of memory or an operation, the indices of the lines after which
    /// it is known to come.
    after: HashMap<usize, Vec<usize>>,
    lines: Vec<String>,
}

impl Order {
    /// Follows the log: a stream does its work in the order in which it was given, and after what
    /// the events that it waited for had recorded.
    pub fn of(log: &Path) -> Order {
        let lines: Vec<String> = std::fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect();
        let (mut after, mut streams, mut events) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (index, line) in lines.iter().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            let ["stream", stream, ref what @ ..] = words[..] else { continue };
            let known: &mut Vec<usize> = streams.entry(stream).or_default();
            match what {
                ["waits", event] => known.extend(events.get(event).into_iter().flatten()),
                ["records", event] => drop(events.insert(*event, known.clone())),
                _ => {
                    after.insert(index, known.clone());
                    known.push(index);
                }
            }
        }
        Order { after, lines }
    }

    /// Returns the lines that say this, in order.
    pub fn of_kind(&self, what: &str) -> Vec<usize> {
        (0..self.lines.len()).filter(|index| self.lines[*index].ends_with(what)).collect()
    }

    /// Fails unless the device does the line `later` after the line `earlier`.
    pub fn check(&self, earlier: usize, later: usize) {
        assert!(
            self.after[&later].contains(&earlier),
            "line {later} ({}) need not come after line {earlier} ({}):\n{}",
            self.lines[later],
            self.lines[earlier],
            self.lines.join("\n")
        );
    }
}

/// Returns the folder with the stand-ins of libcuda and libnccl. Another process may make these
/// files at the same time, so each file gets its name when it is whole.
fn stand_ins() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-ins");
    std::fs::create_dir_all(&folder).unwrap();
    let rest = folder.join(format!("rest-{}.c", std::process::id()));
    let missing = |name| format!("__attribute__((weak)) int {name}(void);\nint {name}(void) {{ return 801; }}\n");
    std::fs::write(&rest, driver_functions().map(missing).collect::<String>()).unwrap();
    // cudarc opens libcuda.so, and devicemesh libcuda.so.1: they are one file, and so one library.
    let link = folder.join(format!("link-{}", std::process::id()));
    std::os::unix::fs::symlink("libcuda.so.1", &link).unwrap();
    std::fs::rename(&link, folder.join("libcuda.so")).unwrap();
    compile(&["device.c".into()], &folder.join("libcuda.so.1"), &[rest.to_str().unwrap(), "-Wl,-soname,libcuda.so.1"]);
    compile(&recorder(), &folder.join("libnccl.so.2"), &["-Wl,-soname,libnccl.so.2", "-ldl"]);
    std::fs::remove_file(rest).unwrap();
    folder
}

/// Returns the C files of the recorder.
fn recorder() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/recorder");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|kind| kind == "c")).collect()
}

fn compile(sources: &[PathBuf], library: &Path, flags: &[&str]) {
    let (root, unfinished) =
        (Path::new(env!("CARGO_MANIFEST_DIR")), library.with_extension(std::process::id().to_string()));
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
    cc.args(sources.iter().map(|source| root.join("tests/nccl").join(source)))
        .arg("-I")
        .arg(root.join("include"))
        .args(flags)
        .arg("-o")
        .arg(&unfinished);
    let done = cc.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    std::fs::rename(unfinished, library).unwrap();
}

/// Returns the functions that cudarc looks up in a driver, from its source. cudarc panics where
/// one is missing.
fn driver_functions() -> impl Iterator<Item = String> {
    let mut cargo = Command::new(env!("CARGO"));
    // Without the filter, cargo needs the packages for other systems, too, which no build has
    // fetched.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["metadata", "--format-version", "1", "--offline", "--all-features", "--filter-platform", &platform]);
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cudarc = metadata["packages"].as_array().unwrap().iter().find(|package| package["name"] == "cudarc").unwrap();
    let source = Path::new(cudarc["manifest_path"].as_str().unwrap()).with_file_name("src/driver/sys/mod.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let names: BTreeSet<String> = source
        .split(".get(b\"")
        .skip(1)
        .filter_map(|rest| rest.split_once("\\0\"").map(|(name, _)| name.to_owned()))
        .collect();
    assert!(names.len() > 400, "{} functions", names.len());
    names.into_iter()
}
