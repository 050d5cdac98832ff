//! Collectives over slices, buffers and bytes.

use std::sync::Arc;
use std::time::Duration;

use devicemesh::comm::{CallOptions, Collective, DimOptions, Memory, Operator, View, World, WorldOptions};
use devicemesh::error::{Result, Status};
use devicemesh::rendezvous::JoinOptions;
use devicemesh::rendezvous::store::{MemoryStore, Store};

use super::{in_worlds, on_ranks};

#[test]
fn collectives_over_slices() {
    on_ranks(4, |mesh, rank| {
        assert_eq!(mesh.mesh().coordinate().unwrap(), [rank / 2, rank % 2]);
        let (along_replicate, along_shard) = ([rank % 2, rank % 2 + 2], [rank / 2 * 2, rank / 2 * 2 + 1]);

        let mut sum = [rank as i64, 10];
        mesh.all_reduce("replicate", &mut sum, Operator::Sum).unwrap();
        assert_eq!(sum, [along_replicate.iter().sum::<usize>() as i64, 20]);
        let mut largest = [rank as f64];
        mesh.all_reduce("shard", &mut largest, Operator::Max).unwrap();
        assert_eq!(largest, [along_shard[1] as f64]);

        let mut half_precision = [half::bf16::from_f32(rank as f32)];
        mesh.all_reduce("shard", &mut half_precision, Operator::Sum).unwrap();
        assert_eq!(half_precision[0].to_f32(), along_shard.iter().sum::<usize>() as f32);
        let mut half_precision = [half::f16::from_f32(0.5 * rank as f32)];
        mesh.all_reduce("shard", &mut half_precision, Operator::Max).unwrap();
        assert_eq!(half_precision[0].to_f32(), 0.5 * along_shard[1] as f32);

        let mut copied = [rank as u8; 3];
        mesh.broadcast("shard", &mut copied, 1).unwrap();
        assert_eq!(copied, [along_shard[1] as u8; 3]);

        let mut gathered = [0u32; 4];
        mesh.all_gather("replicate", &[rank as u32, 7], &mut gathered).unwrap();
        assert_eq!(gathered, [along_replicate[0] as u32, 7, along_replicate[1] as u32, 7]);

        let mut block = [0f32];
        mesh.reduce_scatter("shard", &[rank as f32, 100.0 + rank as f32], &mut block, Operator::Average).unwrap();
        let mean = (along_shard[0] + along_shard[1]) as f32 / 2.0;
        assert_eq!(block, [if rank % 2 == 0 { mean } else { 100.0 + mean }]);

        let mut exchanged = [0i32; 2];
        mesh.all_to_all("shard", &[rank as i32 * 10, rank as i32 * 10 + 1], &mut exchanged).unwrap();
        assert_eq!(exchanged, along_shard.map(|peer| (peer * 10 + rank % 2) as i32));

        // Counts for each rank: two elements for the rank at 0, and three for the rank at 1.
        let (me, shard) = (rank % 2, rank as i32);
        let mut blocks = vec![-1i32; if me == 0 { 4 } else { 6 }];
        let received = if me == 0 { [2, 2] } else { [3, 3] };
        mesh.all_to_allv("shard", &[shard; 5], &[2, 3], &mut blocks, &received).unwrap();
        let expected: Vec<i32> = along_shard.iter().flat_map(|peer| vec![*peer as i32; received[0]]).collect();
        assert_eq!(blocks, expected);
        let mut gathered = [0i32; 5];
        mesh.all_gatherv("shard", &vec![shard; 2 + me], &mut gathered, &[2, 3]).unwrap();
        assert_eq!(gathered, [0, 0, 1, 1, 1].map(|index: usize| along_shard[index] as i32));
        let mut block = vec![0i32; 2 + me];
        mesh.reduce_scatterv("shard", &[1, 2, 3, 4, 5], &[2, 3], &mut block, Operator::Sum).unwrap();
        assert_eq!(block, [&[2, 4][..], &[6, 8, 10]][me]);

        // A flattened dimension, under its name, from the view that it was made of.
        mesh.flatten(Some("all"), &Default::default()).unwrap();
        let mut everybody = [1u64];
        mesh.all_reduce("all", &mut everybody, Operator::Sum).unwrap();
        assert_eq!(everybody, [4]);
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_moves() {
    on_ranks(2, |mesh, _| {
        let refused = |result: Result<()>, status, words: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.status(), status, "{error}");
            assert!(error.message().contains(words), "{error}, expected {words}");
        };
        let mut four = [0f32; 4];
        refused(mesh.all_reduce("nowhere", &mut four, Operator::Sum), Status::NotFound, "nowhere");
        refused(mesh.broadcast("replicate", &mut four, 2), Status::InvalidArgument, "root is 2");
        refused(
            mesh.all_gather("replicate", &[1.0; 3], &mut four),
            Status::InvalidArgument,
            "expected 2 times the 3 of send",
        );
        refused(
            mesh.reduce_scatter("replicate", &[1.0; 3], &mut four, Operator::Sum),
            Status::InvalidArgument,
            "send has 3 elements, expected 2 times the 4 of recv",
        );
        refused(
            mesh.all_to_all("replicate", &[1.0; 3], &mut [0.0; 3]),
            Status::InvalidArgument,
            "the same multiple of 2",
        );
        refused(
            mesh.all_to_allv("replicate", &[1.0; 3], &[1, 1], &mut [0.0; 2], &[1, 1]),
            Status::InvalidArgument,
            "send has 3 elements, which is not the sum of its counts",
        );
        refused(
            mesh.all_gatherv("replicate", &[1.0; 3], &mut four, &[2, 2]),
            Status::InvalidArgument,
            "send has 3 elements, but the count of this rank is 2",
        );
        refused(
            mesh.all_gatherv("replicate", &[1.0; 4], &mut four, &[4]),
            Status::InvalidArgument,
            "has 1 numbers, but dimension replicate has 2 ranks",
        );
        mesh.group_start().unwrap();
        refused(mesh.all_reduce("replicate", &mut four, Operator::Sum), Status::InvalidState, "end the group first");
        mesh.group_end().unwrap();
        mesh.all_reduce("replicate", &mut four, Operator::Sum).unwrap();
    });
}

#[test]
fn bytes_travel_along_a_dimension_and_over_the_world() {
    on_ranks(4, |mesh, rank| {
        let text = |rank: usize| "x".repeat(rank).into_bytes();
        mesh.barrier("shard", None).unwrap();
        let all = mesh.all_gather_bytes("replicate", &text(rank), None).unwrap();
        assert_eq!(all, [text(rank % 2), text(rank % 2 + 2)]);
        let of_root = mesh.broadcast_bytes("shard", &text(rank), 1, None).unwrap();
        assert_eq!(of_root, text(rank / 2 * 2 + 1));
        let error = mesh.broadcast_bytes("shard", &[], 2, None).unwrap_err();
        assert_eq!((error.status(), error.dimension()), (Status::InvalidArgument, Some("shard")));
        assert_eq!(mesh.barrier("nowhere", None).unwrap_err().status(), Status::NotFound);
        assert_eq!(mesh.slice(&["shard"]).unwrap().all_gather_bytes("shard", b"", None).unwrap(), [b""; 2]);
    });
    in_worlds(3, |world, rank| {
        let all = world.all_gather_bytes(&vec![rank as u8; 2_000_000 * rank], None).unwrap();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 2_000_000, 4_000_000]);
        assert!(all[2].iter().all(|byte| *byte == 2));
        assert_eq!(world.broadcast_bytes(b"seed", 2, None).unwrap(), b"seed");
        assert_eq!(world.broadcast_bytes(b"", 3, None).unwrap_err().status(), Status::InvalidArgument);
        // A rank that comes to another call, and then again to the same.
        let made = if rank == 1 { world.barrier(None) } else { world.broadcast_bytes(b"", 0, None).map(drop) };
        assert_eq!(made.unwrap_err().status(), Status::Mismatch);
        assert_eq!(world.locations(Some("here"), None).unwrap(), ["here"; 3]);
    });
}

#[test]
fn a_call_that_may_not_be_made_now_and_options_of_other_dimensions_are_told_apart() {
    in_worlds(2, |world, _| {
        let mesh = View::init(world, &[2, 1], &["replicate", "shard"]).unwrap();
        assert_eq!(mesh.group_end().unwrap_err().status(), Status::InvalidState);
        mesh.check_all().unwrap();
        let two = CallOptions::default().dims(vec![DimOptions::default().own(); 2]);
        let refused = mesh.flatten(Some("all"), &two).map(drop).unwrap_err();
        assert_eq!(refused.status(), Status::InvalidArgument);
        assert!(refused.message().ends_with("there are options for 2 dimensions, but this call makes 1"), "{refused}");
        // A slice must not be in a group.
        mesh.group_start().unwrap();
        let in_group = mesh.broadcast("replicate", &mut [1.0f32], 0).unwrap_err();
        assert_eq!(in_group.status(), Status::InvalidState, "{in_group}");
        mesh.group_end().unwrap();
        let nobody = mesh.shrink(Some("replicate"), &[], &CallOptions::default()).map(drop).unwrap_err();
        assert_eq!(nobody.status(), Status::InvalidState, "{nobody}");
    });
}

#[test]
fn collectives_over_buffers_move_bytes_and_refuse_what_does_not_fit() {
    const UINT8: i32 = 1;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let body = |rank: usize, store: Arc<dyn Store>| {
        let join = JoinOptions::ranked(rank, 2).timeout(Duration::from_secs(60)).store(store);
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        let mesh = View::init(&world, &[2], &["dp"]).unwrap();
        let memory = Memory::of(&world).unwrap();
        assert!(!memory.is_on_device() && memory.device_name().is_none());
        let (send, recv) = (memory.buffer(4).unwrap(), memory.buffer(4).unwrap());
        let mine = rank as u8 * 10;
        let result = |collective: Collective, count: usize, offset: usize| {
            send.write(0, &[mine, mine + 1, mine + 2, mine + 3]).unwrap();
            recv.write(0, &[99; 4]).unwrap();
            mesh.collective(0, collective, UINT8, count, send.at(0), recv.at(offset)).unwrap();
            let mut got = [0; 4];
            recv.read(0, &mut got).unwrap();
            got
        };
        assert_eq!(result(Collective::AllReduce(Operator::Sum), 3, 1), [99, 10, 12, 14]);
        assert_eq!(result(Collective::AllGather, 2, 0), [0, 1, 10, 11]);
        assert_eq!(
            result(Collective::ReduceScatter(Operator::Max), 2, 0)[..2],
            [10 + rank as u8 * 2, 11 + rank as u8 * 2]
        );
        assert_eq!(result(Collective::AllToAll, 2, 0), [mine / 5, mine / 5 + 1, 10 + mine / 5, 11 + mine / 5]);
        assert_eq!(result(Collective::Shift, 1, 0), [10 - mine, 99, 99, 99]);
        assert_eq!(result(Collective::Swap { peer: 1 - rank }, 1, 0), [10 - mine, 99, 99, 99]);
        assert_eq!(result(Collective::Broadcast { root: 1 }, 2, 0)[..2], [10, 11]);
        let reduced = result(Collective::Reduce { op: Operator::Min, root: 0 }, 4, 0);
        assert_eq!(reduced, if rank == 0 { [0, 1, 2, 3] } else { [99; 4] });
        // In place, and what is not quite in place.
        send.write(0, &[mine; 4]).unwrap();
        mesh.collective(0, Collective::AllGather, UINT8, 2, send.at(rank * 2), send.at(0)).unwrap();
        let mut gathered = [0; 4];
        send.read(0, &mut gathered).unwrap();
        assert_eq!(gathered, [0, 0, 10, 10]);
        let (sum, other) = (Collective::AllReduce(Operator::Sum), memory.buffer(4).unwrap());
        for (outcome, words) in [
            (mesh.collective(0, sum, UINT8, 5, send.at(0), other.at(0)), "5 bytes from offset 0 on are not inside"),
            (mesh.collective(0, sum, UINT8, 1, send.at(4), other.at(0)), "from offset 4 on"),
            (mesh.collective(0, sum, UINT8, 2, send.at(0), send.at(1)), "overlap, but not as an in-place call needs"),
            (mesh.collective(0, Collective::Shift, UINT8, 2, send.at(0), send.at(0)), "never works in place"),
            (mesh.collective(0, Collective::Swap { peer: 2 }, UINT8, 1, send.at(0), other.at(0)), "peer is 2"),
            (mesh.collective(0, sum, 12, 1, send.at(0), other.at(0)), "dtype is 12"),
            (mesh.collective(0, Collective::Broadcast { root: 2 }, UINT8, 1, send.at(0), other.at(0)), "root is 2"),
            (mesh.collective(0, sum, UINT8, usize::MAX, send.at(0), other.at(0)), "are not inside"),
        ] {
            let error = outcome.unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.message().contains(words), "{error}");
        }
        mesh.group_start().unwrap();
        let error = mesh.collective(0, sum, UINT8, 1, send.at(0), other.at(0)).unwrap_err();
        assert_eq!(error.status(), Status::InvalidState, "{error}");
        mesh.group_end().unwrap();
        mesh.root_comms().finalize().unwrap();
    };
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = Arc::clone(&store);
            scope.spawn(move || body(rank, store));
        }
    });
}
