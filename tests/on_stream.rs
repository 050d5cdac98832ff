//! Collectives over device memory (feature `cudarc`), on stand-ins of a device and NCCL: results,
//! the order of streams, and what is refused.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use devicemesh::comm::{Memory, MeshOptions, Operator, RootComms, View, World, WorldOptions};
use devicemesh::cudarc;
use devicemesh::error::{Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::rendezvous::JoinOptions;
use devicemesh::rendezvous::store::{MemoryStore, Server, Store};

mod cargo_build;
use cargo_build::cargo_build;
mod stand_in;
use stand_in::{Order, environment, with_device};

/// A world of `size` ranks, of which this is one. The device that is current is the rank's.
fn join(device_type: &str, rank: usize, size: usize, store: Arc<dyn Store>) -> Arc<World> {
    let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).store(store);
    Arc::new(World::join(device_type, &WorldOptions::new(join)).unwrap())
}

/// A mesh of this process alone on device 0.
fn alone() -> (Arc<CudaContext>, View) {
    let context = CudaContext::new(0).unwrap();
    let world = join("cuda", 0, 1, Arc::new(MemoryStore::default()));
    (context, View::init(&world, &[1], &["dp"]).unwrap())
}

/// The timeout of operations that do not end. The mesh is made within it, also where the process
/// stands still for a second.
const SHORT: Duration = Duration::from_millis(1500);

/// A mesh of this process alone, with that timeout.
fn alone_within(timeout: Duration) -> View {
    let world = join("cuda", 0, 1, Arc::new(MemoryStore::default()));
    let spec = MeshSpec::new("cuda", &[1], 1, 0).names(&["dp"]);
    let options = MeshOptions::default().timeout(timeout);
    View::of_root(RootComms::create(&world, Mesh::new(&spec).unwrap(), &options).unwrap())
}

fn values(stream: &Arc<CudaStream>, slice: &CudaSlice<f32>) -> Vec<f32> {
    stream.clone_dtoh(slice).unwrap()
}

fn refused(result: Result<()>, status: Status, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(words), "{error}, expected {words}");
}

#[test]
fn collectives_over_device_memory() {
    with_device("collectives_over_device_memory", &[], |_| {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let rank = |rank: usize| {
            let context = CudaContext::new(rank).unwrap();
            let world = join("cuda", rank, 2, Arc::clone(&store));
            let mesh = View::init(&world, &[1, 2], &["dp", "tp"]).unwrap();
            let stream = context.new_stream().unwrap();
            let on_stream = mesh.on_stream(&stream).unwrap();
            let mine = rank as f32;

            let mut sum = stream.clone_htod(&[mine, 10.0]).unwrap();
            on_stream.all_reduce("tp", &mut sum, Operator::Sum).unwrap();
            assert_eq!(values(&stream, &sum), [1.0, 20.0]);
            on_stream.all_reduce("dp", &mut sum, Operator::Sum).unwrap();
            on_stream.wait(Some("dp"), None).unwrap();
            on_stream.wait(None, Some(Duration::from_secs(60))).unwrap();
            assert_eq!(values(&stream, &sum), [1.0, 20.0]);

            let mut copied = stream.clone_htod(&[mine; 3]).unwrap();
            on_stream.broadcast("tp", &mut copied, 1).unwrap();
            assert_eq!(values(&stream, &copied), [1.0; 3]);

            let mut gathered = stream.alloc_zeros::<f32>(4).unwrap();
            on_stream.all_gather("tp", &mut stream.clone_htod(&[mine, 7.0]).unwrap(), &mut gathered).unwrap();
            assert_eq!(values(&stream, &gathered), [0.0, 7.0, 1.0, 7.0]);

            // Parts of one slice, the second element and the last two.
            let mut parts = stream.clone_htod(&[-1.0, -1.0, mine, 100.0 + mine]).unwrap();
            let (mut block, mut whole) = parts.split_at_mut(2);
            on_stream.reduce_scatter("tp", &mut whole, &mut block.slice_mut(1..), Operator::Average).unwrap();
            assert_eq!(values(&stream, &parts)[..2], [-1.0, if rank == 0 { 0.5 } else { 100.5 }]);

            let mut exchanged = stream.alloc_zeros::<i64>(2).unwrap();
            let mut send = stream.clone_htod(&[rank as i64 * 10, rank as i64 * 10 + 1]).unwrap();
            on_stream.all_to_all("tp", &mut send, &mut exchanged).unwrap();
            assert_eq!(stream.clone_dtoh(&exchanged).unwrap(), [rank as i64, 10 + rank as i64]);

            // Under the name of a flattened dimension.
            mesh.flatten(Some("all"), &Default::default()).unwrap();
            on_stream.all_reduce("all", &mut copied, Operator::Sum).unwrap();
            assert_eq!(values(&stream, &copied), [2.0; 3]);
            mesh.root_comms().finalize().unwrap();
        };
        std::thread::scope(|scope| [0, 1].map(|this| scope.spawn(move || rank(this))).map(|one| one.join().unwrap()));
    });
}

/// The program may make another device current meanwhile.
#[test]
fn memory_lies_on_the_device_of_its_world() {
    with_device("memory_lies_on_the_device_of_its_world", &[], |log| {
        let first = CudaContext::new(0).unwrap();
        first.bind_to_thread().unwrap();
        let world = join("cuda", 0, 1, Arc::new(MemoryStore::default()));
        let memory = Memory::of(&world).unwrap();
        let second = CudaContext::new(1).unwrap();
        second.bind_to_thread().unwrap();
        let buffer = memory.buffer(4).unwrap();
        buffer.write(0, &[1, 2, 3, 4]).unwrap();
        let mut got = [0; 4];
        buffer.read(0, &mut got).unwrap();
        assert_eq!(got, [1, 2, 3, 4]);
        drop(buffer);
        let order = Order::of(log);
        assert_eq!(order.of_kind("context 1000 allocates").len(), 1);
        assert_eq!(order.of_kind("context 1000 gives memory back").len(), 1);
        let current = cudarc::driver::result::ctx::get_current().unwrap();
        assert_eq!(current, Some(second.cu_ctx()), "the program's own choice stays");
    });
}

/// The slice lies on one stream, the operation on another: what comes later on the first waits, and
/// what came before is waited for.
#[test]
fn operations_are_ordered_with_all_uses_of_their_buffers() {
    with_device("operations_are_ordered_with_all_uses_of_their_buffers", &[], |log| {
        let (context, mesh) = alone();
        let (home, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let mut read = home.clone_htod(&[1.0f32]).unwrap();
        let mut freed = home.clone_htod(&[1.0f32]).unwrap();
        let mut sent = home.clone_htod(&[1.0f32]).unwrap();
        let on_stream = mesh.on_stream(&other).unwrap();
        on_stream.all_reduce("dp", &mut read, Operator::Sum).unwrap();
        assert_eq!(values(&home, &read), [1.0]);
        on_stream.all_gather("dp", &mut sent, &mut freed).unwrap();
        // A read on a third stream does not make cudarc forget that the operation reads the slice,
        // too.
        values(&context.new_stream().unwrap(), &sent);
        drop(freed);
        drop(sent);
        let order = Order::of(log);
        let (written, runs, frees) =
            (order.of_kind("writes"), order.of_kind("runs ncclAllReduce"), order.of_kind("frees"));
        order.check(written[0], runs[0]);
        order.check(runs[0], order.of_kind("reads")[0]);
        let gathers = order.of_kind("runs ncclAllGather");
        order.check(written[1], gathers[0]);
        order.check(written[2], gathers[0]);
        assert_eq!(frees.len(), 2);
        order.check(gathers[0], frees[0]);
        order.check(gathers[0], frees[1]);
        mesh.root_comms().finalize().unwrap();
    });
}

/// cudarc stops to order streams when the program has dropped the second one, whose work may go on.
#[test]
fn a_stream_that_is_dropped_stays_until_its_work_is_done() {
    with_device("a_stream_that_is_dropped_stays_until_its_work_is_done", &[("CUDA_BUSY", "1")], |log| {
        let (context, mesh) = alone();
        let default = context.default_stream();
        let mut slice = default.clone_htod(&[1.0f32]).unwrap();
        let stream = context.new_stream().unwrap();
        mesh.on_stream(&stream).unwrap().all_reduce("dp", &mut slice, Operator::Sum).unwrap();
        drop(stream);
        values(&default, &slice);
        let order = Order::of(log);
        order.check(order.of_kind("runs ncclAllReduce")[0], order.of_kind("reads")[0]);
        assert!(order.of_kind("ends").is_empty());
        mesh.root_comms().finalize().unwrap();
    });
}

#[test]
fn streams_that_are_dropped_and_done_end() {
    with_device("streams_that_are_dropped_and_done_end", &[], |log| {
        let (context, mesh) = alone();
        let mut slice = context.default_stream().clone_htod(&[1.0f32]).unwrap();
        for _ in 0..10 {
            let stream = context.new_stream().unwrap();
            mesh.on_stream(&stream).unwrap().all_reduce("dp", &mut slice, Operator::Sum).unwrap();
        }
        // The last one ends when another operation is queued.
        assert_eq!(Order::of(log).of_kind("ends").len(), 9);
        mesh.root_comms().finalize().unwrap();
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_queued() {
    with_device("what_does_not_fit_is_refused_before_anything_is_queued", &[], |log| {
        let (context, mesh) = alone();
        let stream = context.new_stream().unwrap();
        let mut three = stream.clone_htod(&[1.0f32; 3]).unwrap();
        let mut four = stream.clone_htod(&[1.0f32; 4]).unwrap();
        let on_stream = mesh.on_stream(&stream).unwrap();
        let wrong = Status::InvalidArgument;
        refused(on_stream.all_reduce("tp", &mut four, Operator::Sum), Status::NotFound, "dimension tp does not exist");
        refused(on_stream.broadcast("dp", &mut four, 1), wrong, "root is 1");
        refused(
            on_stream.all_gather("dp", &mut three, &mut four),
            wrong,
            "recv has 4 elements, expected 1 times the 3 of send",
        );
        refused(
            on_stream.reduce_scatter("dp", &mut three, &mut four, Operator::Sum),
            wrong,
            "send has 3 elements, expected 1 times the 4",
        );
        refused(on_stream.all_to_all("dp", &mut three, &mut four), wrong, "send has 3 elements and recv 4");

        let error = mesh.on_stream(&context.per_thread_stream()).err().unwrap();
        assert!(error.message().contains("per-thread default stream"), "{error}");

        mesh.group_start().unwrap();
        refused(on_stream.all_reduce("dp", &mut four, Operator::Sum), Status::InvalidState, "end the group first");
        mesh.group_end().unwrap();
        on_stream.all_reduce("dp", &mut four, Operator::Sum).unwrap();

        let another = CudaContext::new(0).unwrap();
        let mut theirs = another.default_stream().clone_htod(&[1.0f32]).unwrap();
        refused(
            on_stream.all_reduce("dp", &mut theirs, Operator::Sum),
            wrong,
            "values is of another CudaContext (device 0)",
        );
        let second = CudaContext::new(1).unwrap();
        let far = second.new_stream().unwrap();
        let mut theirs = far.clone_htod(&[1.0f32]).unwrap();
        let on_far = mesh.on_stream(&far).unwrap();
        refused(
            on_far.all_reduce("dp", &mut theirs, Operator::Sum),
            wrong,
            "the stream is of device 1, but the communicator was made on device 0",
        );
        assert_eq!(Order::of(log).of_kind("runs ncclAllReduce").len(), 1);
        mesh.root_comms().finalize().unwrap();
        refused(on_stream.all_reduce("dp", &mut four, Operator::Sum), Status::Aborted, "dm_finalize");
    });
}

#[test]
fn device_type_cpu_has_no_streams() {
    with_device("device_type_cpu_has_no_streams", &[], |_| {
        let world = join("cpu", 0, 1, Arc::new(MemoryStore::default()));
        let mesh = View::init(&world, &[1], &["dp"]).unwrap();
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let error = mesh.on_stream(&stream).err().unwrap();
        assert_eq!(error.status(), Status::Unsupported);
        assert!(error.message().contains("device type cpu"), "{error}");
    });
}

/// An operation that the library may queue later than the call returns would use buffers that are
/// gone.
#[test]
fn an_operation_that_is_not_queued_in_time_ends_the_mesh() {
    with_device("an_operation_that_is_not_queued_in_time_ends_the_mesh", &[("RECORDER_LATE", "600000")], |_| {
        let context = CudaContext::new(0).unwrap();
        let mesh = alone_within(SHORT);
        let stream = context.new_stream().unwrap();
        let mut slice = stream.clone_htod(&[1.0f32]).unwrap();
        let on_stream = mesh.on_stream(&stream).unwrap();
        refused(on_stream.all_reduce("dp", &mut slice, Operator::Sum), Status::Timeout, "all_reduce");
        refused(on_stream.all_reduce("dp", &mut slice, Operator::Sum), Status::Aborted, "was aborted");
    });
}

#[test]
fn nothing_is_queued_when_the_stream_cannot_wait_for_the_buffers() {
    with_device("nothing_is_queued_when_the_stream_cannot_wait_for_the_buffers", &[("CUDA_WAIT", "700")], |log| {
        let (context, mesh) = alone();
        let mut slice = context.default_stream().clone_htod(&[1.0f32]).unwrap();
        let stream = context.new_stream().unwrap();
        let sum = mesh.on_stream(&stream).unwrap().all_reduce("dp", &mut slice, Operator::Sum);
        assert_eq!(sum.as_ref().unwrap_err().device_error(), 700);
        refused(sum, Status::Device, "all_reduce: waiting for the last use of a buffer");
        assert!(Order::of(log).of_kind("runs ncclAllReduce").is_empty());
        mesh.root_comms().finalize().unwrap();
    });
}

/// A peer may never come, and then the operation ends only with its communicator.
#[test]
fn an_operation_that_cannot_be_recorded_is_waited_for_until_the_timeout() {
    let variables = [("CUDA_UNRECORDED", "1"), ("CUDA_BUSY", "1")];
    with_device("an_operation_that_cannot_be_recorded_is_waited_for_until_the_timeout", &variables, |log| {
        let context = CudaContext::new(0).unwrap();
        let mesh = alone_within(SHORT);
        let mut slice = context.default_stream().clone_htod(&[1.0f32]).unwrap();
        let stream = context.new_stream().unwrap();
        let on_stream = mesh.on_stream(&stream).unwrap();
        let sum = on_stream.all_reduce("dp", &mut slice, Operator::Sum);
        refused(sum, Status::Device, "all_reduce: recording the use of a buffer");
        // cuStreamSynchronize has no deadline.
        assert!(Order::of(log).of_kind("host waits for stream 1").is_empty());
        refused(on_stream.all_reduce("dp", &mut slice, Operator::Sum), Status::Aborted, "was aborted");
    });
}

/// The example finds a device and NCCL, so that its numbers lie in device memory.
#[test]
fn the_example_sums_on_four_devices() {
    let example = cargo_build(&["--example", "all_reduce"], "examples/all_reduce");
    let server = Server::bind(("127.0.0.1", 0)).unwrap();
    let rank = |rank: usize| {
        let mut process = Command::new(&example);
        process
            .envs(environment())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", server.local_addr().port().to_string());
        process.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("WORLD_SIZE", "4").env("RANK", rank.to_string());
        process.env("LOCAL_RANK", rank.to_string()).stdout(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..4).map(rank).collect();
    for (rank, process) in ranks.into_iter().enumerate() {
        let done = process.wait_with_output().unwrap();
        let output = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "rank {rank}: {output}");
        assert_eq!(output.trim_end(), format!("rank {rank} on cuda: 1048576 elements are 4, 0 are not 4"));
    }
}
