//! `ncclCommRevoke` and `ncclCommGrow` among real processes, on one host and on several, and the
//! deaths of ranks meanwhile. `DM_HOSTCCL_HOST` names the hosts.
//!
//! The ranks are child processes, which play a scene (child_ranks).

mod child_ranks;
mod common;

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use child_ranks::{Part, Rank, listen, say, start_on};
use common::{Comm, DEADLINE, from_hex, gather, hex_of, last_error, ok};
use hostccl::types::*;
use hostccl::*;

const VARIABLES: [(&str, &str); 1] = [("HOSTCCL_TIMEOUT_MS", "60000")];

/// Starts a rank that comes to the growth by that id, and has `size` ranks afterwards.
fn start_new(scene: &str, host: &str, rank: usize, size: usize, id: &ncclUniqueId) -> Rank {
    let variables = [VARIABLES[0], ("DM_HOSTCCL_HOST", host)];
    Rank::start_with(scene, rank, size, id, &variables)
}

/// Waits in an all-reduce that other ranks do not begin. Returns the result.
fn block(comm: &Comm) -> ncclResult_t {
    let (sent, mut got) = (1_i32, 0_i32);
    // SAFETY: both places hold one number, and outlive the call.
    unsafe { ncclAllReduce((&raw const sent).cast(), (&raw mut got).cast(), 1, 2, 0, comm.0, null_mut()) }
}

/// Grows `parent` to `size` ranks, or comes to its growth. Returns the numbers of all ranks, or the
/// result and the message of the failure.
fn grow(parent: Option<&Comm>, size: usize, id: Option<ncclUniqueId>, rank: c_int) -> Result<Comm, String> {
    let mut grown = null_mut();
    let parent = parent.map_or(null_mut(), |comm| comm.0);
    let id = id.as_ref().map_or(null(), |id| &raw const *id);
    // SAFETY: the token is live or NULL, and there is a place for the communicator.
    match unsafe { ncclCommGrow(parent, size as c_int, id, rank, &raw mut grown, null_mut()) } {
        0 => Ok(Comm(grown)),
        code => Err(format!("{code} {}", last_error())),
    }
}

/// Makes an id, and writes it for the test.
fn make_id(comm: &Comm) -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: there is a place for the id.
    ok(unsafe { ncclCommGetUniqueId(comm.0, &raw mut id) });
    say(&hex_of(&id));
    id
}

/// Says how a growth ended.
fn say_grown(grown: Result<Comm, String>, rank: usize) {
    match &grown {
        Ok(grown) => {
            let half = grown.split((rank % 2) as c_int, 0).unwrap();
            let (all, half) = (gather(grown, rank as i64), gather(&half, rank as i64));
            say(&format!("rank {} of {all:?} and {half:?}", grown.rank()));
        }
        Err(error) => say(error),
    }
    // The communicators, and the maker of the id, live until the test is done.
    listen();
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Some(Part { scene, rank, size, id }) = Part::of_this_process() else { return };
    let (scene, more) = scene.split_once(' ').unwrap_or((scene.as_str(), "0"));
    let more: usize = more.parse().unwrap();
    match scene {
        // Rank 1 makes the id. All ranks, and `more` new ones, grow.
        "grow" => {
            let comm = Comm::init(id, size, rank);
            let id = (rank == 1).then(|| make_id(&comm));
            say_grown(grow(Some(&comm), size + more, id, -1), rank);
        }
        // A rank that comes to the growth of a communicator.
        "come" => say_grown(grow(None, size, Some(id), rank as c_int), rank),
        // As "grow", but a rank grows when the test says so, or is killed instead.
        "late" => {
            let comm = Comm::init(id, size, rank);
            let id = (rank == 1).then(|| make_id(&comm));
            say("ready");
            if listen() == "grow" {
                say_grown(grow(Some(&comm), size + more, id, -1), rank);
            }
        }
        // All ranks but the last are blocked, the last one revokes. Then all split, and all but
        // rank 0 shrink.
        "revoke" => {
            let comm = Comm::init(id, size, rank);
            say("ready");
            if rank + 1 == size {
                listen();
            } else {
                let result = block(&comm);
                say(&format!("{result} {}", last_error()));
                listen();
            }
            // SAFETY: the token is live.
            ok(unsafe { ncclCommRevoke(comm.0, NCCL_REVOKE_DEFAULT) });
            let half = comm.split((rank % 2) as c_int, -(rank as c_int)).unwrap();
            let halves = gather(&half, rank as i64);
            let mut fewer = Comm(null_mut());
            if rank != 0 {
                // SAFETY: the list has one rank, and there is a place for the communicator.
                ok(unsafe { ncclCommShrink(comm.0, [0].as_mut_ptr(), 1, &raw mut fewer.0, null_mut(), 0) });
            }
            let fewer_ranks = if rank == 0 { vec![] } else { gather(&fewer, rank as i64) };
            say(&format!("{halves:?} {fewer_ranks:?}"));
            listen();
        }
        other => panic!("{other}"),
    }
}

/// Hears that all ranks have joined. So a rank that sleeps later does not wait for the join.
fn all_ready(ranks: &mut [Rank]) {
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
}

#[test]
fn ranks_of_all_hosts_wake_when_one_revokes() {
    for hosts in [["a", "a", "a", "a"], ["a", "a", "b", "b"], ["a", "b", "c", "a"]] {
        let mut ranks = start_on("revoke", &hosts, &VARIABLES);
        all_ready(&mut ranks);
        ranks[..3].iter().for_each(Rank::until_it_waits);
        ranks[3].tell("revoke");
        let began = Instant::now();
        for rank in &mut ranks[..3] {
            let line = rank.hear();
            let named = line.starts_with("6 ") && line.contains("rank 3 (pid") && line.contains("revoked");
            assert!(named, "{hosts:?}: {line}");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        ranks[..3].iter_mut().for_each(|rank| rank.tell("revoke, too"));
        let lines: Vec<String> = ranks.iter_mut().map(Rank::hear).collect();
        let expected = ["[2, 0] []", "[3, 1] [1, 2, 3]", "[2, 0] [1, 2, 3]", "[3, 1] [1, 2, 3]"];
        assert_eq!(lines, expected, "{hosts:?}");
    }
}

#[test]
fn new_ranks_come_on_old_hosts_and_on_new_ones() {
    for (old, new) in [
        (&["a", "a"][..], &["a", "a"][..]),
        (&["a", "a"], &["b"]),
        (&["a", "b"], &["a", "c", "b"]),
        (&["a", "a", "b", "b"], &["b", "a"]),
    ] {
        let (size, all) = (old.len(), old.len() + new.len());
        let mut ranks = start_on(&format!("grow {}", new.len()), old, &VARIABLES);
        let id = from_hex(&ranks[1].hear());
        let come = |(at, host): (usize, &&str)| start_new("come", host, size + at, all, &id);
        ranks.extend(new.iter().enumerate().map(come));
        let expected: Vec<String> = (0..all)
            .map(|rank| {
                let half: Vec<usize> = (0..all).filter(|other| other % 2 == rank % 2).collect();
                format!("rank {rank} of {:?} and {half:?}", (0..all).collect::<Vec<_>>())
            })
            .collect();
        let lines: Vec<String> = ranks.iter_mut().map(Rank::hear).collect();
        assert_eq!(lines, expected, "{old:?} {new:?}");
    }
}

/// Checks that each of these ranks says within a time that `dead` has gone.
fn all_name(ranks: Vec<&mut Rank>, began: Instant, dead: &str, hosts: &[&str]) {
    for rank in ranks {
        let line = rank.hear();
        assert!(line.starts_with("6 ") && line.contains(dead), "{hosts:?}: {line}");
    }
    assert!(began.elapsed() < DEADLINE / 4, "{:?}", began.elapsed());
}

#[test]
fn an_old_rank_that_dies_before_it_grows_is_named_on_all_others() {
    for hosts in [["a", "a", "a"], ["a", "a", "b"], ["a", "b", "b"]] {
        let mut ranks = start_on("late 1", &hosts, &VARIABLES);
        let id = from_hex(&ranks[1].hear());
        all_ready(&mut ranks);
        let mut new = start_new("come", "b", 3, 4, &id);
        ranks[..2].iter_mut().for_each(|rank| rank.tell("grow"));
        ranks[..2].iter().for_each(Rank::until_it_waits);
        ranks[2].child.kill().unwrap();
        let began = Instant::now();
        let [first, second, _] = &mut ranks[..] else { panic!() };
        all_name(vec![first, second, &mut new], began, "rank 2", &hosts);
        // A new rank that comes now learns it, too.
        let began = Instant::now();
        all_name(vec![&mut start_new("come", "a", 3, 4, &id)], began, "rank 2", &hosts);
    }
}

#[test]
fn the_maker_of_the_id_that_dies_ends_the_growth_for_all() {
    for hosts in [["a", "a"], ["a", "b"]] {
        let mut ranks = start_on("late 1", &hosts, &VARIABLES);
        let id = from_hex(&ranks[1].hear());
        all_ready(&mut ranks);
        let mut new = start_new("come", "a", 2, 3, &id);
        ranks[0].tell("grow");
        ranks[0].until_it_waits();
        ranks[1].child.kill().unwrap();
        let began = Instant::now();
        all_name(vec![&mut ranks[0]], began, "rank 1", &hosts);
        let line = new.hear();
        assert!(line.contains("the process that made the unique id") || line.contains("maker"), "{hosts:?}: {line}");
        assert!(began.elapsed() < DEADLINE / 4, "{:?}", began.elapsed());
    }
}

#[test]
fn a_new_rank_that_dies_is_named_on_all_others() {
    for (hosts, host) in [(["a", "a"], "a"), (["a", "a"], "b"), (["a", "b"], "a")] {
        let mut ranks = start_on("grow 2", &hosts, &VARIABLES);
        let id = from_hex(&ranks[1].hear());
        let mut new = start_new("come", host, 2, 4, &id);
        // Rank 1 has made the id. It has to know of the new rank before that one dies.
        Rank::until_all_wait(ranks.iter().chain([&new]));
        new.child.kill().unwrap();
        let began = Instant::now();
        let [first, second] = &mut ranks[..] else { panic!() };
        all_name(vec![first, second], began, "rank 2", &hosts);
    }
}
