//! What other processes read in the recording of a process that runs, waits or has ended
//! (docs/recording.md). The ranks are processes of their own.

mod comm_timeout;
mod ports;

use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use comm_timeout::set_comm_timeout;
use devicemesh::ccl::RawComm;
use devicemesh::comm::{DimOptions, MeshOptions, Operands, Operator, RootComms, View, World, WorldOptions};
use devicemesh::error::Error;
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::rendezvous::JoinOptions;
use ports::free_port;
use recording::place::NAME;
use recording::{ChannelState, EntryState, Operation, RecordedCall, RecordedChannel, Recorder, Snapshot, layout};

/// The variable that tells a child process what to do: its rank, the size of the world, its role,
/// and the port at which the ranks meet.
const CHILD: &str = "RECORDING_CHILD";

/// The timeout of a rank that waits in vain. It begins when the other rank is where its message
/// says.
const SHORT: Duration = Duration::from_millis(1500);

/// The timeout of all else. It does not end before the test does, also where a process stands still
/// on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A rank.
struct Rank {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, size: usize, role: &str, port: u16, variables: &[(&str, &Path)]) -> Rank {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--ignored", "--nocapture"]);
        command.env(CHILD, format!("{rank} {size} {role} {port}")).env_remove("DM_TRACE_DIR").env_remove("DM_RECORDER");
        command.envs(variables.iter().copied());
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::piped()).spawn().unwrap();
        let (output, (say, lines)) = (BufReader::new(child.stdout.take().unwrap()), channel());
        std::thread::spawn(move || {
            for line in output.lines().map_while(std::io::Result::ok) {
                if let Some((_, said)) = line.split_once("said: ") {
                    let _ = say.send(said.to_owned());
                }
            }
        });
        let stdin = child.stdin.take();
        Rank { child, stdin, lines }
    }

    /// Returns the next line that the rank says.
    fn says(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(60)).expect("the rank says something")
    }

    /// Lets the rank go on from where it waits for its parent.
    fn go_on(&mut self) {
        writeln!(self.stdin.as_mut().unwrap(), "go on").unwrap();
    }

    fn recording(&self) -> Snapshot {
        let found = recordings(self.child.id());
        let [recording] = &found[..] else { panic!("process {} has {} recordings", self.child.id(), found.len()) };
        Snapshot::of_file(recording).unwrap()
    }

    fn ends_well(&mut self) {
        self.stdin.take();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The recordings of a process that have no name in any file system.
fn recordings(pid: u32) -> Vec<File> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
    let is_recording = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:devicemesh-recording"))
    };
    entries.filter(is_recording).map(|path| File::open(path).unwrap()).collect()
}

fn start(size: usize, role: &str) -> Vec<Rank> {
    let port = free_port();
    (0..size).map(|rank| Rank::start(rank, size, role, port, &[])).collect()
}

fn say(text: impl std::fmt::Display) {
    println!("\nsaid: {text}");
}

/// Waits until the parent lets this rank go on.
fn wait_for_parent() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

fn join(rank: usize, size: usize, port: u16) -> Result<Arc<World>, Error> {
    let method = format!("tcp://127.0.0.1:{port}");
    let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).init_method(method);
    World::join("cpu", &WorldOptions::new(join)).map(Arc::new)
}

fn mesh_within(world: &Arc<World>, shape: &[usize], names: &[&str], timeout: Duration) -> View {
    mesh_with(world, shape, names, &MeshOptions::default().timeout(timeout))
}

fn mesh_with(world: &Arc<World>, shape: &[usize], names: &[&str], options: &MeshOptions) -> View {
    let spec = MeshSpec::new("cpu", shape, world.size(), world.rank()).names(names);
    View::of_root(RootComms::create(world, Mesh::new(&spec).unwrap(), options).unwrap())
}

/// Makes a mesh along dp, and another one along tp with a communicator of its own.
fn two_meshes(world: &Arc<World>) -> [View; 2] {
    let options = MeshOptions::default().dims(vec![DimOptions::default().own()]).timeout(LONG);
    [mesh_within(world, &[2], &["dp"], LONG), mesh_with(world, &[2], &["tp"], &options)]
}

/// Reduces in vain along dp, when the parent has seen the other rank where it stays.
fn reduce_in_vain(mesh: &View) {
    wait_for_parent();
    set_comm_timeout(mesh, SHORT);
    say_outcome(mesh.all_reduce("dp", &mut [1.0_f32; 8], Operator::Sum));
}

/// What the ranks do.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [rank, size, port] = [words[0], words[1], words[3]].map(|word| word.parse::<usize>().unwrap());
    let _other = (words[2] == "two_copies").then(other_recording);
    let world = match join(rank, size, port as u16) {
        Ok(world) => world,
        Err(error) => return say(format_args!("{}: {}", error.status().name(), error.message())),
    };
    match &*words[2].replace('_', " ") {
        "waits" => waits(&world),
        "traced" => {
            let mesh = View::init(&world, &[size], &["dp"]).unwrap();
            mesh.all_reduce("dp", &mut [1.0_f32; 8], Operator::Sum).unwrap();
            world.finalize(None).unwrap();
        }
        "deadline" | "two copies" => deadline(&world),
        "elsewhere" => elsewhere(&world),
        "crossed" => crossed(&world),
        "differs" => differs(&world),
        "raw elsewhere" => raw_elsewhere(&world),
        "raw" => raw(&world),
        "forks" => forks(world),
        "alone" => {
            say("joined");
            wait_for_parent();
        }
        role => panic!("{role}"),
    }
}

/// Opens a recording as another copy of the library in this process would.
fn other_recording() -> File {
    let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
    let recorder = Recorder::new(words, std::process::id(), "alpha", "0.1.0");
    // SAFETY: the name is a text of C.
    let memory = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
    assert!(memory >= 0);
    // SAFETY: the descriptor is new, and nobody else has it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(memory) });
    file.write_all_at(&recorder.with_memory().unwrap().1, 0).unwrap();
    file
}

/// Rank 0 waits in the fourth all-reduce along dp, in which rank 1 does not come before its parent
/// lets it.
fn waits(world: &Arc<World>) {
    let mesh = mesh_within(world, &[2, 1], &["dp", "tp"], Duration::from_secs(60));
    let mut values = [1.0_f32; 8];
    for _ in 0..3 {
        mesh.all_reduce("dp", &mut values, Operator::Sum).unwrap();
    }
    mesh.barrier("dp", None).unwrap();
    say("ready");
    if world.rank() == 1 {
        wait_for_parent();
    }
    mesh.all_reduce("dp", &mut values, Operator::Max).unwrap();
    mesh.all_gather_bytes("dp", b"bytes", None).unwrap();
    say("done");
    wait_for_parent();
    mesh.root_comms().finalize().unwrap();
    say("finalized");
    wait_for_parent();
    world.finalize(None).unwrap();
}

/// What a call that fails says.
fn say_outcome(outcome: Result<(), Error>) {
    match outcome {
        Ok(()) => say("done"),
        Err(error) => say(format_args!("{}: {}", error.status().name(), error.message())),
    }
}

/// Rank 0 waits in its second all-reduce, in which rank 1 does not come. Rank 0 has made operations
/// of its own, which are no calls of the group.
fn deadline(world: &Arc<World>) {
    let mesh = mesh_within(world, &[2], &["dp"], LONG);
    let mut values = [1.0_f32; 8];
    if world.rank() == 0 {
        let operands = Operands::new(8, 7, std::ptr::null_mut());
        (0..2).for_each(|_| mesh.operate("mine", 0, operands, &[], |_, _| 0).unwrap());
    }
    mesh.all_reduce("dp", &mut values, Operator::Sum).unwrap();
    if world.rank() == 0 {
        reduce_in_vain(&mesh);
    } else {
        say("has reduced");
        wait_for_parent();
    }
}

/// Rank 0 waits in an all-reduce while rank 1 waits for it in a barrier of the world. Then rank 0
/// waits in a barrier while rank 1 is in no call.
fn elsewhere(world: &Arc<World>) {
    let mesh = mesh_within(world, &[2], &["dp"], LONG);
    if world.rank() == 0 {
        reduce_in_vain(&mesh);
        wait_for_parent();
        world.barrier(Some(LONG)).unwrap();
        say_outcome(world.barrier(Some(SHORT)));
    } else {
        say("ready");
        world.barrier(Some(LONG)).unwrap();
        wait_for_parent();
    }
}

/// The two ranks call along dimensions of two meshes with communicators of their own, in different
/// orders.
fn crossed(world: &Arc<World>) {
    let [first, second] = two_meshes(world);
    if world.rank() == 0 {
        reduce_in_vain(&first);
    } else {
        say("ready");
        say_outcome(second.all_reduce("tp", &mut [1.0_f32; 8], Operator::Sum));
    }
    wait_for_parent();
}

/// Rank 0 waits along a dimension of one mesh, and rank 1 in a call of its own on the communicator
/// of another mesh.
fn raw_elsewhere(world: &Arc<World>) {
    let [first, second] = two_meshes(world);
    if world.rank() == 0 {
        return reduce_in_vain(&first);
    }
    say("ready");
    type AllReduce = unsafe extern "C" fn(*const f32, *mut f32, usize, i32, i32, RawComm, *mut c_void) -> i32;
    // SAFETY: the symbol is the function of that name in the engine's API.
    let all_reduce: AllReduce = unsafe { std::mem::transmute(second.symbol("ncclAllReduce").unwrap()) };
    let (mut values, comm) = ([1.0_f32; 4], second.comm(0).unwrap());
    let at = values.as_mut_ptr();
    // SAFETY: the buffer has four elements, and the communicator lives.
    unsafe { all_reduce(at, at, 4, 7, 0, comm, std::ptr::null_mut()) };
}

/// Rank 1 leaves the second of three calls out.
fn differs(world: &Arc<World>) {
    let mesh = mesh_within(world, &[2], &["dp"], Duration::from_secs(20));
    let call = |count: usize| mesh.all_reduce("dp", &mut vec![1.0_f32; count], Operator::Sum);
    call(8).unwrap();
    if world.rank() == 0 {
        say_outcome(call(16));
    } else {
        say_outcome(call(8));
    }
    wait_for_parent();
}

/// The program calls the engine's C functions itself.
fn raw(world: &Arc<World>) {
    let mesh = View::init(world, &[world.size()], &["dp"]).unwrap();
    mesh.all_reduce("dp", &mut [1.0_f32; 8], Operator::Sum).unwrap();
    type AllReduce = unsafe extern "C" fn(*const f32, *mut f32, usize, i32, i32, RawComm, *mut c_void) -> i32;
    let comm = mesh.comm(0).unwrap();
    let symbol = mesh.symbol("ncclAllReduce").unwrap();
    // SAFETY: the symbol is the function of that name in the engine's API.
    let all_reduce: AllReduce = unsafe { std::mem::transmute(symbol) };
    let mut values = [1.0_f32; 4];
    let at = values.as_mut_ptr();
    for _ in 0..2 {
        // SAFETY: the buffer has four elements, and the communicator lives.
        assert_eq!(unsafe { all_reduce(at, at, 4, 7, 0, comm, std::ptr::null_mut()) }, 0);
    }
    say("called");
    wait_for_parent();
    mesh.root_comms().finalize().unwrap();
    say("finalized");
    wait_for_parent();
}

/// A child that is forked when the world has ended has nothing of the recording, and may have one
/// of its own.
fn forks(world: Arc<World>) {
    assert!(hostccl::recorder::get().is_some());
    world.finalize(None).unwrap();
    drop(world);
    // SAFETY: the child ends with _exit. It allocates, which the C library allows after a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let outcome = std::panic::catch_unwind(|| {
            assert!(hostccl::recorder::get().is_none() && recordings(std::process::id()).is_empty());
            let _world = join(0, 1, 1).unwrap();
            let own = Snapshot::of_file(&recordings(std::process::id())[0]).unwrap();
            assert_eq!((own.process.pid, own.worlds.len()), (std::process::id(), 1));
        });
        // SAFETY: it only ends the process.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the child is this process's own, and the status is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    say(format_args!("the child has ended with {status}"));
    assert_eq!(recordings(std::process::id()).len(), 1);
}

fn find<'a>(snapshot: &'a Snapshot, name: &str) -> &'a RecordedChannel {
    let named = |channel: &&RecordedChannel| channel.name == name;
    snapshot.channels.iter().find(named).unwrap_or_else(|| panic!("no {name} in {:#?}", snapshot.channels))
}

/// Reads a rank's recording again and again until `is_there`, which must be soon.
fn read_until(rank: &Rank, is_there: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let began = Instant::now();
    loop {
        let snapshot = rank.recording();
        if is_there(&snapshot) {
            return snapshot;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "not there: {snapshot:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts two ranks of a scene. Rank 0 goes on when rank 1 says "ready" and then is in a call of
/// the group with that name.
fn start_when_in(role: &str, group: &str) -> Vec<Rank> {
    let mut ranks = start(2, role);
    assert_eq!(ranks[1].says(), "ready");
    read_until(&ranks[1], |snapshot| {
        let named = snapshot.channels.iter().filter(|channel| channel.name == group);
        let mut last = named.filter_map(|channel| snapshot.calls_of(channel).next_back());
        last.any(|call| call.state == EntryState::Running)
    });
    ranks[0].go_on();
    ranks
}

fn last_of<'a>(snapshot: &'a Snapshot, channel: &RecordedChannel) -> &'a RecordedCall {
    snapshot.calls_of(channel).next_back().expect("the group has calls")
}

#[test]
fn a_rank_that_waits_is_read_from_outside() {
    let mut ranks = start(2, "waits");
    ranks.iter().for_each(|rank| assert_eq!(rank.says(), "ready"));
    // A rank counts a call before it writes the call into the ring.
    let is_in_fourth = |snapshot: &Snapshot| last_of(snapshot, find(snapshot, "mesh/dp")).in_channel == 4;
    let waits = read_until(&ranks[0], is_in_fourth);
    let behind = ranks[1].recording();

    let worlds = [&waits.worlds[0], &behind.worlds[0]];
    assert_eq!(
        worlds.map(|world| (world.rank, world.size, world.epoch, world.has_ended)),
        [(0, 2, 0, false), (1, 2, 0, false)]
    );
    assert_eq!(worlds[0].key, worlds[1].key);
    assert!(worlds[0].store.contains("127.0.0.1"), "{}", worlds[0].store);
    assert_eq!(waits.process.pid, ranks[0].child.id());

    let dp = [find(&waits, "mesh/dp"), find(&behind, "mesh/dp")];
    assert_eq!(dp[0].key, dp[1].key);
    assert_eq!(
        dp.map(|dp| (dp.kind, dp.rank, dp.size, dp.members.to_vec())),
        [(0, 0, 2, vec![0, 1]), (0, 1, 2, vec![0, 1])]
    );
    assert_eq!(dp.map(|dp| (dp.calls_begun, dp.calls_ended)), [(4, 3), (3, 3)]);
    assert_eq!(dp[0].world, Some(worlds[0].number));
    let last = last_of(&waits, dp[0]);
    assert_eq!((last.state, last.in_channel, last.ended), (EntryState::Running, 4, None));
    assert_eq!(
        (last.call.operation, last.call.dtype, last.call.reduction, last.call.count),
        (Operation::AllReduce, 7, 2, 8)
    );
    let third = waits.calls_of(dp[0]).nth_back(1).unwrap();
    assert_eq!((third.state, third.digest), (EntryState::Done, dp[1].digest));
    // The two groups of one rank along tp are not one group.
    assert_ne!(find(&waits, "mesh/tp").key, find(&behind, "mesh/tp").key);

    let scope = find(&behind, "the world");
    let texts: Vec<_> = behind.calls_of(scope).map(|call| behind.text(call).unwrap().to_owned()).collect();
    assert!(texts.iter().any(|text| text.starts_with("dm_init(")), "{texts:?}");
    let barrier = behind.calls.iter().find(|call| call.call.operation == Operation::Barrier).unwrap();
    assert_eq!((behind.text(barrier), barrier.state), (Some("dm_barrier(dim=dp)"), EntryState::Done));
    let joins: Vec<_> = behind.channels.iter().filter(|channel| channel.name == "the join").collect();
    assert_eq!(joins.len(), 1, "{:#?}", behind.channels);

    ranks[1].go_on();
    ranks.iter().for_each(|rank| assert_eq!(rank.says(), "done"));
    let (waited, came) = (ranks[0].recording(), ranks[1].recording());
    let dp = [find(&waited, "mesh/dp"), find(&came, "mesh/dp")];
    assert_eq!(dp.map(|dp| (dp.calls_begun, dp.calls_ended)), [(4, 4); 2]);
    assert_eq!(dp[0].digest, dp[1].digest);
    let last = last_of(&waited, dp[0]);
    assert!(last.ended.unwrap() > last.begun, "the rank has waited: {last:?}");
    assert!(
        waited.calls.iter().any(|call| call.call.operation == Operation::StoreBytes && call.state == EntryState::Done)
    );
    let unended: Vec<_> = waited.calls.iter().filter(|call| call.state != EntryState::Done).collect();
    assert!(unended.is_empty(), "{unended:#?}");

    ranks.iter_mut().for_each(Rank::go_on);
    ranks.iter().for_each(|rank| assert_eq!(rank.says(), "finalized"));
    let ended = ranks[0].recording();
    assert_eq!(find(&ended, "mesh/dp").state, ChannelState::Closed);
    assert!(!ended.worlds[0].has_ended);
    ranks.iter_mut().for_each(Rank::go_on);
    ranks.iter_mut().for_each(Rank::ends_well);
}

#[test]
fn a_recording_in_a_folder_outlives_the_process() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("recordings-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let port = free_port();
    let start = |rank| Rank::start(rank, 2, "traced", port, &[("DM_TRACE_DIR", &folder)]);
    let mut ranks: Vec<Rank> = (0..2).map(start).collect();
    ranks.iter_mut().for_each(Rank::ends_well);
    let files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let snapshot = Snapshot::of_file(&File::open(file).unwrap()).unwrap();
        assert!(name.ends_with(".dmrec") && name.contains(&format!("-{}-", snapshot.process.pid)), "{name}");
        assert_eq!(snapshot.process.host, host.trim());
        assert!(snapshot.worlds[0].has_ended);
        let dp = find(&snapshot, "mesh/dp");
        assert_eq!((dp.calls_ended, last_of(&snapshot, dp).state), (1, EntryState::Done));
        assert!(
            snapshot.nanoseconds_per_tick(None).is_some()
                || snapshot.process.later.ticks - snapshot.process.began.ticks < 1 << 24
        );
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_folder_that_is_of_no_use_is_an_error_and_the_switch_turns_all_off() {
    let refused = |variables: &[(&str, &Path)]| Rank::start(0, 1, "alone", 1, variables).says();
    let said = refused(&[("DM_TRACE_DIR", Path::new("/no/such/folder"))]);
    assert!(
        said.starts_with("DM_STATUS_INVALID_ARGUMENT") && said.contains("DM_TRACE_DIR is /no/such/folder"),
        "{said}"
    );
    let said = refused(&[("DM_RECORDER", Path::new("yes"))]);
    assert!(said.contains("DM_RECORDER is \"yes\": it must be 1 (the default) or 0"), "{said}");
    let mut off = Rank::start(0, 1, "alone", 1, &[("DM_RECORDER", Path::new("0"))]);
    assert_eq!(off.says(), "joined");
    assert!(recordings(off.child.id()).is_empty());
    off.ends_well();
}

/// The line of a rank, whose parts must all be there.
fn says_all(rank: &Rank, parts: &[&str]) {
    let said = rank.says();
    for part in parts {
        assert!(said.contains(part), "no {part:?} in {said:?}");
    }
}

#[test]
fn the_error_at_the_deadline_says_where_the_late_rank_is() {
    for role in ["deadline", "two_copies"] {
        let mut ranks = start(2, role);
        assert_eq!(ranks[1].says(), "has reduced");
        ranks[0].go_on();
        let place = "; rank 1 is at all-reduce 1 of mesh/dp; this rank is in all-reduce 2 of mesh/dp";
        says_all(&ranks[0], &["DM_STATUS_TIMEOUT: ", "rank 1 did not come within 1500 ms", place]);
        ranks.iter_mut().for_each(Rank::ends_well);
    }
}

#[test]
fn the_error_at_the_deadline_says_where_else_the_late_rank_waits() {
    let mut ranks = start_when_in("elsewhere", "the world");
    let place =
        "; rank 1 has made no call of mesh/dp and is in dm_world_barrier(); this rank is in all-reduce 1 of mesh/dp";
    says_all(&ranks[0], &["DM_STATUS_TIMEOUT: ", place]);
    ranks[0].go_on();
    let place = "; this rank is in dm_world_barrier() of the world";
    says_all(&ranks[0], &["DM_STATUS_TIMEOUT: rank 1 never called dm_world_barrier() as call 3 ", place]);
    ranks.iter_mut().for_each(Rank::ends_well);
}

#[test]
fn dimensions_that_are_called_in_different_orders_are_named() {
    let mut ranks = start_when_in("crossed", "mesh2/tp");
    let crossed = "rank 1 has made no call of mesh/dp and is in all-reduce 1 of mesh2/tp, which this rank has not begun: these ranks call along mesh/dp and mesh2/tp in different orders";
    says_all(&ranks[0], &["DM_STATUS_TIMEOUT: ", crossed]);
    ranks.iter_mut().for_each(Rank::ends_well);
}

#[test]
fn a_late_rank_may_be_in_a_call_of_the_program_itself() {
    let ranks = start_when_in("raw_elsewhere", "mesh_tp");
    let place =
        "rank 1 has made no call of mesh/dp and is in all-reduce 1 of mesh_tp; this rank is in all-reduce 1 of mesh/dp";
    says_all(&ranks[0], &["DM_STATUS_TIMEOUT: ", place]);
}

#[test]
fn the_first_call_that_differs_is_named() {
    let mut ranks = start(2, "differs");
    let first = "; the first call of mesh/dp in which these ranks differ is call 2: rank 0 all-reduce of 16 float32 (sum), rank 1 all-reduce of 8 float32 (sum)";
    ranks.iter().for_each(|rank| says_all(rank, &["DM_STATUS_MISMATCH: ", first]));
    ranks.iter_mut().for_each(Rank::ends_well);
}

#[test]
fn a_forked_child_has_a_recording_of_its_own() {
    let mut rank = Rank::start(0, 1, "forks", 1, &[]);
    assert_eq!(rank.says(), "the child has ended with 0");
    rank.ends_well();
}

#[test]
fn raw_calls_are_recorded_for_their_communicator() {
    let mut ranks = start(2, "raw");
    ranks.iter().for_each(|rank| assert_eq!(rank.says(), "called"));
    let snapshots: Vec<Snapshot> = ranks.iter().map(Rank::recording).collect();
    let of_kind = |snapshot: &Snapshot| snapshot.channels.iter().filter(|it| it.kind == 2).cloned().collect::<Vec<_>>();
    let raw: Vec<RecordedChannel> = snapshots.iter().flat_map(of_kind).collect();
    let [first, second] = &raw[..] else { panic!("{raw:#?}") };
    assert_eq!((first.key, first.digest, first.size), (second.key, second.digest, 2));
    assert_eq!((first.rank, second.rank, &*first.members), (0, 1, &[0, 1][..]));
    assert_eq!((first.calls_begun, first.calls_ended, &*first.name), (2, 2, "mesh_dp"));
    // A call of the mesh is no raw call.
    assert_eq!(find(&snapshots[0], "mesh/dp").calls_begun, 1);
    ranks.iter_mut().for_each(Rank::go_on);
    ranks.iter().for_each(|rank| assert_eq!(rank.says(), "finalized"));
    assert_eq!(of_kind(&ranks[0].recording())[0].state, ChannelState::Closed);
    ranks.iter_mut().for_each(Rank::ends_well);
}

#[test]
fn meshes_that_are_made_again_and_again_give_their_places_back() {
    // One process as one rank, so that the recording is this process's own.
    let world = join(0, 1, 1).unwrap();
    let before = Snapshot::of_file(&recordings(std::process::id())[0]).unwrap().process.channels_left_out;
    for round in 0..400 {
        let mesh = View::init(&world, &[1, 1, 1], &["dp", "cp", "tp"]).unwrap();
        mesh.all_reduce("cp", &mut [1.0_f32], Operator::Sum).unwrap();
        match round % 3 {
            0 => mesh.root_comms().finalize().unwrap(),
            1 => mesh.root_comms().abort().unwrap(),
            _ => {}
        }
    }
    let snapshot = Snapshot::of_file(&recordings(std::process::id())[0]).unwrap();
    assert_eq!(snapshot.process.channels_left_out, before);
    let open = snapshot.channels.iter().filter(|channel| channel.state == ChannelState::Open).count();
    assert!(open < 40, "{open} groups are open");
}
