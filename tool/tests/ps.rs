//! `devicemesh ps`, with jobs of the real tool.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;

/// A job that ends with the test.
struct Job {
    child: Child,
    id: String,
}

impl Job {
    /// Starts a job with a name of its own, because other jobs of this user may run here.
    fn start(name: &str, arguments: &[&str]) -> Job {
        let id = format!("{name}-{}", std::process::id());
        let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
        command.args(["run", "--rdzv-id", &id, "--grace-period", "0.1"]).args(arguments);
        Job { child: command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap(), id }
    }

    /// Waits until `ps` shows this job with these values.
    fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let shown = self.shown();
            match shown {
                Some(job) if is_so(&job) => return job,
                shown => assert!(Instant::now() < until, "not {what}: {shown:?}"),
            }
        }
    }

    /// This job in the list of `ps`.
    fn shown(&self) -> Option<Value> {
        let list: Value = serde_json::from_str(&ps(&["--json"])).unwrap();
        list["jobs"].as_array().unwrap().iter().find(|job| job["name"] == self.id.as_str()).cloned()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

fn ps(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_devicemesh")).arg("ps").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn pid(value: &Value) -> Pid {
    Pid::from_raw(value.as_i64().unwrap() as i32).unwrap()
}

#[test]
fn a_job_is_shown_from_its_start_to_its_end() {
    // Rank 0 computes, and rank 1 has a child.
    let script = "if [ $RANK = 0 ]; then while :; do :; done; fi; sleep 1000; exit 0";
    let mut job = Job::start("shown", &["-n", "2", "--", "/bin/sh", "-c", script]);
    let shown = job.until("two ranks, one with a child", |job| {
        job["ranks"][1]["processes"] == 2 && job["ranks"][0]["cpu_percent"].as_f64() > Some(0.0)
    });
    assert_eq!((&shown["state"], &shown["launcher"]), (&"running".into(), &"devicemesh run".into()), "{shown}");
    assert_eq!(shown["pid"], job.child.id());
    assert_eq!((&shown["world_size"], &shown["command"][2]), (&2.into(), &script.into()), "{shown}");
    assert!(shown["memory_bytes"].as_u64() > Some(10_000), "{shown}");
    assert!(shown["elapsed"].as_f64() < Some(60.0) && shown["started"].as_f64() > Some(1e9), "{shown}");
    let text = ps(&[]);
    let line = text.lines().find(|line| line.starts_with(&job.id)).unwrap();
    assert!(line.contains(&format!(" {} ", job.child.id())) && line.contains("0-1 of 2"), "{text}");

    let ranks = [0, 1].map(|rank| pid(&shown["ranks"][rank]["pid"]));
    ranks.iter().for_each(|rank| kill_process_group(*rank, Signal::STOP).unwrap());
    job.until("stopped", |job| job["state"] == "stopped");
    ranks.iter().for_each(|rank| kill_process_group(*rank, Signal::CONT).unwrap());
    job.until("running again", |job| job["state"] == "running");
    // Rank 1 ends well, when its child has ended.
    kill_process_group(ranks[1], Signal::KILL).unwrap();
    job.child.wait().unwrap();
    assert_eq!(job.shown(), None);
}

#[test]
fn a_job_with_a_rank_less_is_ending() {
    let job = Job::start("ending", &["-n", "2", "--", "/bin/sh", "-c", "test $RANK = 0 || exec sleep 1000"]);
    let shown = job.until("ending", |job| job["state"] == "ending");
    assert_eq!(shown["ranks"].as_array().unwrap().len(), 1, "{shown}");
}

#[test]
fn a_tool_that_waits_for_nodes_is_shown() {
    let endpoint = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:9"];
    let job = Job::start("waiting", &[&endpoint[..], &["-n", "1", "--", "/bin/true"]].concat());
    let shown = job.until("waiting", |job| job["state"] == "waiting");
    assert_eq!((&shown["world_size"], &shown["command"]), (&Value::Null, &Value::from(vec!["/bin/true"])), "{shown}");
    assert!(ps(&[]).contains("waiting"));
    // Ctrl-Z in its terminal stops it.
    kill_process(Pid::from_child(&job.child), Signal::TSTP).unwrap();
    job.until("stopped", |job| job["state"] == "stopped");
    kill_process(Pid::from_child(&job.child), Signal::CONT).unwrap();
    job.until("waiting again", |job| job["state"] == "waiting");
}
