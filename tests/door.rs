//! Processes join a running job in place of a rank that has died (docs/recovery.md, "The door"),
//! over the server of rank 0 and over a folder. The rank that dies and its successors are processes
//! of their own, and the other ranks are threads. src/rendezvous/agreement/recovery/tests has the
//! cases of the protocol.

mod ports;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Result, Status};
use devicemesh::rendezvous::store::{Store, TcpStore};
use devicemesh::rendezvous::{
    Arrival, Decision, Epoch, Join, JoinOptions, Made, Outcome, Recovery, Replicas, Request, Terms, World,
};
use devicemesh::wait::Wait;
use ports::free_port;

const SIZE: usize = 3;
const MESH: &str = "dm_init(names=(dp))";
/// The variable that tells a child process what to do: its rank, the size of the world, the device
/// type, its role, and where the ranks meet.
const CHILD: &str = "DOOR_CHILD";

fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

fn options(rank: usize, size: usize, method: &str) -> JoinOptions {
    JoinOptions::ranked(rank, size).timeout(Duration::from_secs(20)).init_method(method)
}

/// A process of the rank that has died, which is killed in the end.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    /// Starts a process with that role: `first` takes part in the join of the world. `comes` comes
    /// into the running job, `hangs` does not make its part of the mesh, and `impatient` waits at
    /// the door for a short time, and then as long as needed.
    fn start(role: &str, method: &str, join: &str) -> Process {
        Process::of(1, SIZE, "cpu", role, method, join)
    }

    fn of(rank: usize, size: usize, device_type: &str, role: &str, method: &str, join: &str) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--ignored", "--nocapture"]);
        command.env(CHILD, format!("{rank} {size} {device_type} {role} {method}")).env("DM_JOIN", join);
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let (output, (say, lines)) = (BufReader::new(child.stdout.take().unwrap()), channel());
        std::thread::spawn(move || {
            for line in output.lines().map_while(std::io::Result::ok) {
                if let Some((_, said)) = line.split_once("door: ") {
                    let _ = say.send(said.to_owned());
                }
            }
        });
        Process { child, lines }
    }

    /// Returns the next line that the process says.
    fn says(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(30)).expect("the process says something")
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(text: impl std::fmt::Display) {
    println!("\ndoor: {text}");
}

fn say_error(error: &Error) {
    say(format_args!("{}: {}", error.status().name(), error.message()));
}

/// What the processes of the rank that has died do.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = text.splitn(5, ' ').collect();
    let (rank, size) = (words[0].parse().unwrap(), words[1].parse().unwrap());
    let world = match World::join(words[2], &options(rank, size, words[4]).join(Join::Auto)) {
        Ok(world) => world,
        Err(error) => return say_error(&error),
    };
    if words[3] == "first" {
        assert!(!world.is_at_door());
        world.barrier(None).unwrap();
        say("ready");
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    assert!(world.is_at_door());
    let calls: [(&str, Result<()>); 4] = [
        ("barrier", world.barrier(None)),
        ("scope", world.scope().map(drop)),
        ("subscope", world.subscope("some", [0, 1].into(), 1).map(drop)),
        ("recovery", world.recovery(first_epoch()).map(drop)),
    ];
    for (name, outcome) in calls {
        let error = outcome.expect_err(name);
        assert_eq!(error.status(), Status::InvalidState, "{name}");
        assert_eq!(
            error.message(),
            format!(
                "rank {rank} has joined a running job and was not let in yet: call dm_init first, which asks for its place in the mesh and waits for the job's next recovery"
            )
        );
    }
    let request = Request { seat: rank, mesh: if words[3] == "other" { "dm_init(names=(tp))" } else { MESH } };
    let make = |_: &Recovery| {
        if words[3] == "hangs" {
            say("let in");
            std::thread::sleep(Duration::from_secs(60));
        }
        Ok(())
    };
    if words[3] == "impatient" {
        say_error(&world.come_in(&request, make, &Wait::after(Duration::from_millis(100))).map(drop).unwrap_err());
    }
    say("knocks");
    match world.come_in(&request, make, &soon()) {
        Ok((recovery, made)) => {
            assert!(made.is_some() && !world.is_at_door());
            // A thread of this process may have asked for the door before this one came in.
            let error = world.come_in(&request, make, &soon()).map(drop).unwrap_err();
            assert_eq!(error.status(), Status::InvalidState, "{error}");
            say(format_args!("epoch {}: {}", recovery.epoch_number(), seats(&recovery)));
            world.barrier(None).unwrap();
            say(format_args!("ticket {}", world.ticket().unwrap()));
            // It stays a member until it is killed.
            std::thread::sleep(Duration::from_secs(60));
        }
        Err(error) => say_error(&error),
    }
}

fn first_epoch() -> Epoch {
    let ranks: Vec<i32> = (0..SIZE as i32).collect();
    Epoch::first(SIZE, Replicas { sizes: vec![SIZE], dim: 0 }, &ranks)
}

fn seats(recovery: &Recovery) -> String {
    let text = Decision::Epoch(recovery.epoch().clone()).to_string();
    text.split(' ').find_map(|field| field.strip_prefix("seats=")).unwrap_or_default().to_owned()
}

/// One of the ranks that live.
struct Rank {
    world: World,
    recovery: Recovery,
}

impl Rank {
    fn join(rank: usize, method: &str) -> Rank {
        let world = World::join("cpu", &options(rank, SIZE, method)).unwrap();
        let mut recovery = world.recovery(first_epoch()).unwrap();
        recovery.expect_mesh(MESH);
        world.barrier(None).unwrap();
        Rank { world, recovery }
    }

    /// Recovers, and waits for so long for processes that could take the empty seats. Returns the
    /// epoch and its seats.
    fn recover(&mut self, replace: Duration) -> String {
        self.recover_by(&Terms { replace, ..Terms::default() })
    }

    fn recover_by(&mut self, terms: &Terms) -> String {
        let arrival = Arrival { call: "dm_recover()", terms, has_state: true, lost: &[], suspects: &[] };
        loop {
            assert_eq!(self.recovery.come(&arrival, &soon()).unwrap(), Outcome::Epoch);
            self.world.enter_epoch(&self.recovery).unwrap();
            if self.recovery.make(Ok(()), &soon()).unwrap() == Made::Whole {
                return format!("epoch {}: {}", self.recovery.epoch_number(), seats(&self.recovery));
            }
        }
    }

    fn await_waiting(&self, count: i32) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.world.num_waiting().unwrap() != count {
            assert!(Instant::now() < end, "{} wait, not {count}", self.world.num_waiting().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A job of which one rank has died. The others know it.
struct Job {
    ranks: [Rank; 2],
}

impl Job {
    fn start(method: &str) -> Job {
        Job::without(1, method)
    }

    fn without(lost: usize, method: &str) -> Job {
        let mut first = Process::of(lost, SIZE, "cpu", "first", method, "");
        let others = [1, 2].map(|next| (lost + next) % SIZE);
        let ranks = std::thread::scope(|threads| {
            let all = others.map(|rank| threads.spawn(move || Rank::join(rank, method)));
            all.map(|rank| rank.join().unwrap())
        });
        assert_eq!(first.says(), "ready");
        first.kill();
        for rank in &ranks {
            let error = rank.world.barrier(None).unwrap_err();
            assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[lost as i32][..]), "{error}");
        }
        Job { ranks }
    }

    /// Runs `work` on both ranks, and `beside` on this thread.
    fn on_both<T: Send, U>(&mut self, work: impl Fn(&mut Rank) -> T + Sync, beside: impl FnOnce() -> U) -> ([T; 2], U) {
        let [zero, two] = &mut self.ranks;
        std::thread::scope(|threads| {
            let zero = threads.spawn(|| work(zero));
            let two = threads.spawn(|| work(two));
            let beside = beside();
            ([zero.join().unwrap(), two.join().unwrap()], beside)
        })
    }
}

/// A newcomer is let in and killed before it has made its part of the mesh, another one dies at the
/// door, and the third one comes in.
fn a_rank_comes_back(method: &str, join: &str) {
    let mut job = Job::start(method);
    let dead = Process::start("comes", method, join);
    assert_eq!(dead.says(), "knocks");
    job.ranks[0].await_waiting(1);
    job.ranks[1].await_waiting(1);
    drop(dead);
    job.ranks[0].await_waiting(0);
    job.ranks[1].await_waiting(0);
    let (told, last) = job.on_both(
        |rank| {
            let told = rank.recover(Duration::from_secs(20));
            rank.world.barrier(None).unwrap();
            assert_eq!(rank.world.lost_ranks(&soon()).unwrap(), Vec::<i32>::new());
            told
        },
        || {
            let mut hanging = Process::start("hangs", method, join);
            assert_eq!((hanging.says(), hanging.says()), ("knocks".to_owned(), "let in".to_owned()));
            hanging.kill();
            let comes = Process::start("comes", method, join);
            assert_eq!(comes.says(), "knocks");
            assert_eq!(comes.says(), "epoch 2: 0,1:3,2");
            assert_eq!(comes.says(), "ticket 3");
            comes
        },
    );
    assert_eq!(told, ["epoch 2: 0,1:3,2", "epoch 2: 0,1:3,2"]);
    // The newcomer is a member now, and its loss is one of its rank.
    drop(last);
    for rank in &job.ranks {
        let error = rank.world.barrier(None).unwrap_err();
        assert_eq!((error.status(), error.lost()), (Status::PeerLost, &[1][..]), "{error}");
        assert_eq!(rank.world.num_waiting().unwrap(), 0);
    }
}

fn folder(name: &str) -> String {
    format!("file://{}/{name}-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id())
}

/// The server knows that rank 1 is lost, so its successors need no word that a job runs.
#[test]
fn a_rank_comes_back_over_a_server() {
    a_rank_comes_back(&format!("tcp://127.0.0.1:{}", free_port()), "auto");
}

#[test]
fn a_rank_comes_back_over_a_folder() {
    let method = folder("door");
    a_rank_comes_back(&method, "running");
    // Rank 1 has never left in order, so what the world has left stays, as after any crash.
    remove(&method);
}

/// Nothing is special about rank 0 where it does not serve the store.
#[test]
fn rank_0_comes_back() {
    let method = folder("door-0");
    let mut job = Job::without(0, &method);
    let (told, comes) = job.on_both(
        |rank| {
            let told = rank.recover(Duration::from_secs(20));
            rank.world.barrier(None).unwrap();
            told
        },
        || {
            let comes = Process::of(0, SIZE, "cpu", "comes", &method, "running");
            assert_eq!((comes.says(), comes.says()), ("knocks".to_owned(), "epoch 1: 0:1,1-2".to_owned()));
            assert_eq!(comes.says(), "ticket 1");
            comes
        },
    );
    assert_eq!(told, ["epoch 1: 0:1,1-2", "epoch 1: 0:1,1-2"]);
    drop(comes);
    remove(&method);
}

/// A rank beyond the world lets the mesh grow. Its world is larger than that of the job.
#[test]
fn a_rank_beyond_the_world_comes_in() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let mut job = Job::start(&method);
    let comes = Process::of(SIZE, SIZE + 1, "cpu", "comes", &method, "running");
    assert_eq!(comes.says(), "knocks");
    job.ranks.iter().for_each(|rank| rank.await_waiting(1));
    let grow = |rank: &mut Rank| {
        let told = rank.recover_by(&Terms { max_size: Some(SIZE + 1), ..Terms::default() });
        rank.world.barrier(None).unwrap();
        told
    };
    // Where the mesh must not grow, there is no place, and no reason to recover again and again.
    let (told, ()) = job.on_both(|rank| rank.recover(Duration::ZERO), || ());
    assert_eq!(told, ["epoch 1: 0,-,2", "epoch 1: 0,-,2"]);
    assert_eq!(job.ranks[0].world.num_waiting().unwrap(), 0);
    let (told, said) = job.on_both(grow, || [comes.says(), comes.says()]);
    assert_eq!((told[0].as_str(), said), ("epoch 2: 0,-,2-3", ["epoch 2: 0,-,2-3".to_owned(), "ticket 0".to_owned()]));
    assert_eq!(told[0], told[1]);
}

/// What a process is told that cannot come in, and what it does not change.
#[test]
fn newcomers_are_refused() {
    let port = free_port();
    let method = format!("tcp://127.0.0.1:{port}");
    let mut job = Job::start(&method);
    let refused = |rank: usize, size: usize, device_type: &str, role: &str, join: &str| {
        Process::of(rank, size, device_type, role, &method, join).says()
    };
    let at = format!("(tcp://127.0.0.1:{port})");
    assert_eq!(
        refused(1, 4, "cpu", "comes", "running"),
        format!(
            "DM_STATUS_MISMATCH: rank 1 joins a world of 4 ranks, and the running job has 3: start this process with the world size of the job, or give each job an address of its own {at}"
        )
    );
    assert_eq!(
        refused(1, 3, "cuda", "comes", "running"),
        format!(
            "DM_STATUS_MISMATCH: rank 1 joins with device type cuda, and the running job has cpu: start this process with the options of the job {at}"
        )
    );
    let store = TcpStore::connect("127.0.0.1", port, &soon()).unwrap();
    let key = "devicemesh/0/0/running";
    let running = String::from_utf8(store.get(key, &soon()).unwrap()).unwrap();
    let other = running.replace(env!("CARGO_PKG_VERSION"), "9.8.7");
    store.set(key, other.as_bytes(), &soon()).unwrap();
    assert_eq!(
        refused(1, 3, "cpu", "comes", "running"),
        format!(
            "DM_STATUS_MISMATCH: rank 1 has libdevicemesh {}, and the running job has 9.8.7: start this process with the library of the job {at}",
            env!("CARGO_PKG_VERSION")
        )
    );
    let lines: Vec<&str> = running.split('\n').collect();
    let elsewhere = running.replace(lines[5], "elsewhere");
    store.set(key, elsewhere.as_bytes(), &soon()).unwrap();
    let said = refused(1, 3, "cpu", "comes", "running");
    let start = "DM_STATUS_MISMATCH: rank 1 came back on a host that does not share the memory of the ranks of the running job (elsewhere, here ";
    assert!(said.starts_with(start), "{said}");
    store.set(key, running.as_bytes(), &soon()).unwrap();
    // Without a word that a job runs, a process for a rank that lives is one that was started
    // twice.
    let said = refused(2, 3, "cpu", "comes", "auto");
    assert!(said.contains("two processes joined tcp://127.0.0.1:"), "{said}");
    let said = refused(1, 3, "cpu", "comes", "new");
    assert!(said.contains("two processes joined tcp://127.0.0.1:"), "{said}");
    let said = refused(1, 3, "cpu", "comes", "soon");
    assert_eq!(said, "DM_STATUS_INVALID_ARGUMENT: DM_JOIN is \"soon\": it must be auto, new or running");
    assert_eq!(job.ranks[0].world.num_waiting().unwrap(), 0);

    // These wait at the door until the next recovery: one for a rank that lives, one with another
    // mesh, and two for rank 1, of which the second is too late. Each of them is told.
    let lives = Process::of(2, 3, "cpu", "comes", &method, "running");
    assert_eq!(lives.says(), "knocks");
    job.ranks[0].await_waiting(1);
    let other = Process::start("other", &method, "running");
    assert_eq!(other.says(), "knocks");
    job.ranks[0].await_waiting(2);
    let comes = Process::start("impatient", &method, "running");
    let said = comes.says();
    let start = format!(
        "DM_STATUS_TIMEOUT: the running job in tcp://127.0.0.1:{port} did not let rank 1 in within 100 ms: epoch 0 has stood for "
    );
    assert!(said.starts_with(&start), "{said}");
    assert_eq!(comes.says(), "knocks");
    job.ranks[0].await_waiting(3);
    let second = Process::start("comes", &method, "running");
    assert_eq!(second.says(), "knocks");
    job.ranks[0].await_waiting(4);
    let (told, came) = job.on_both(
        |rank| {
            let told = rank.recover(Duration::ZERO);
            rank.world.barrier(None).unwrap();
            told
        },
        || comes.says(),
    );
    assert_eq!(told, [came.clone(), came.clone()]);
    assert!(came.starts_with("epoch 1: 0,1:") && came.ends_with(",2"), "{came}");
    assert_eq!(
        lives.says(),
        "DM_STATUS_MISMATCH: rank 2 lives, and has taken part in epoch 1 after this process came: end that process first, or start this one under another rank"
    );
    assert_eq!(
        other.says(),
        "DM_STATUS_MISMATCH: the mesh of the job is dm_init(names=(dp)), and rank 1 asks for dm_init(names=(tp)): start it with the program and the options of the job"
    );
    let said = second.says();
    assert!(said.starts_with("DM_STATUS_MISMATCH: another process came back as rank 1 before this one"), "{said}");
    // Nobody is waited for any more.
    assert_eq!(job.ranks[0].world.num_waiting().unwrap(), 0);
}

/// Rank 1 comes back too late: the others have left, or have ended the job by a decision.
#[test]
fn a_newcomer_is_told_that_the_job_has_ended() {
    let ended = "DM_STATUS_INVALID_STATE: the job that ran here has ended: its ranks have left, or all of them are lost; start a new job, with all of its ranks and without DM_JOIN=running";
    let method = folder("ended");
    let job = Job::start(&method);
    job.ranks.iter().for_each(|rank| rank.world.leave());
    // A folder does not know who is lost. The newcomer reads it when it waits.
    let late = Process::start("comes", &method, "running");
    assert_eq!((late.says().as_str(), late.says().as_str()), ("knocks", ended));
    drop(job);
    remove(&method);

    let mut job = Job::start(&method);
    let end = |rank: &mut Rank| {
        let terms = Terms { ends: true, ..Terms::default() };
        let arrival = Arrival { call: "end", terms: &terms, has_state: true, lost: &[], suspects: &[] };
        rank.recovery.come(&arrival, &soon()).unwrap()
    };
    assert_eq!(job.on_both(end, || ()).0, [Outcome::Ended, Outcome::Ended]);
    assert_eq!(Process::start("comes", &method, "running").says(), ended);
    drop(job);
    remove(&method);

    // A server knows who is lost. This one runs on because the world of rank 0 was not dropped.
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let job = Job::start(&method);
    job.ranks.iter().for_each(|rank| rank.world.leave());
    assert_eq!(Process::start("comes", &method, "running").says(), ended);
    // Without a word that a job runs, it looks for a new one, and finds the old one.
    let said = Process::start("comes", &method, "auto").says();
    assert!(said.contains("two processes joined tcp://127.0.0.1:"), "{said}");
}

/// Removes the folder of a job whose ranks have not all left in order.
fn remove(method: &str) {
    std::fs::remove_dir_all(format!("{}.devicemesh", method.trim_start_matches("file://"))).unwrap();
}
