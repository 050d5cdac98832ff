//! Rank plans against brute force, and what every plan keeps.

use std::time::Duration;

use devicemesh::topology::{MAX_LEVELS, plan};
use proptest::prelude::*;

#[test]
fn a_mesh_has_as_many_dimensions_of_size_one_as_a_call_may_list() {
    assert_eq!(plan(&["a"], &[1; 1 << 16], None).unwrap().ranks, [0]);
}

/// Returns the cost as the documentation defines it, pair by pair.
fn cost(locations: &[String], shape: &[usize], traffic: &[u64], ranks: &[i32]) -> u128 {
    let levels = locations.iter().map(|path| path.split('/').count()).max().unwrap_or(0);
    let domain = |rank: i32, level: usize| locations[rank as usize].split('/').take(level + 1).collect::<Vec<_>>();
    let mut total = 0;
    let mut stride = ranks.len();
    for (size, traffic) in shape.iter().zip(traffic) {
        stride /= size;
        let coordinate = |position: usize| position / stride % size;
        let others = |position: usize| position - coordinate(position) * stride;
        let mut pairs = 0;
        for a in 0..ranks.len() {
            for b in (0..ranks.len()).filter(|b| others(a) == others(*b)) {
                pairs += (0..levels).filter(|level| domain(ranks[a], *level) != domain(ranks[b], *level)).count();
            }
        }
        total += u128::from(*traffic) * pairs as u128 * (ranks.len() / size) as u128;
    }
    total
}

/// Branch and bound over all ways to place ranks in a mesh. Ranks at one location are alike to the
/// cost, so each such way is tried once.
struct Exhaustive {
    /// For each location, how many of its ranks are left.
    left: Vec<Vec<i32>>,
    /// For two locations, the levels at which their ranks are apart.
    far: Vec<Vec<u128>>,
    /// For each position, the earlier positions to which it talks, and how much.
    talk: Vec<Vec<(usize, u128)>>,
    ranks: Vec<usize>,
    least: u128,
    /// Whether all locations look alike, so that the first rank may be anywhere.
    symmetric: bool,
}

impl Exhaustive {
    /// Returns the least cost of all, which is `known` when nothing is cheaper.
    fn optimum(locations: &[String], shape: &[usize], traffic: &[u64], known: u128, symmetric: bool) -> u128 {
        let levels = locations.iter().map(|path| path.split('/').count()).max().unwrap_or(0);
        let domain = |rank: usize, level: usize| locations[rank].split('/').take(level + 1).collect::<Vec<_>>();
        let far = |a, b| (0..levels).filter(|level| domain(a, *level) != domain(b, *level)).count() as u128;
        let world = locations.len();
        let size: usize = shape.iter().product();
        let mut talk = vec![Vec::new(); size];
        let mut stride = size;
        for (dim, traffic) in shape.iter().zip(traffic) {
            stride /= dim;
            let others = |position: usize| position - position / stride % dim * stride;
            for (a, talk) in talk.iter_mut().enumerate() {
                // The cost counts both orders of the pair.
                let weight = 2 * u128::from(*traffic) * (size / dim) as u128;
                talk.extend((0..a).filter(|b| others(a) == others(*b)).map(|b| (b, weight)));
            }
        }
        let mut left: Vec<Vec<i32>> = Vec::new();
        for rank in 0..world as i32 {
            match left.iter_mut().find(|ranks| locations[ranks[0] as usize] == locations[rank as usize]) {
                Some(ranks) => ranks.push(rank),
                None => left.push(vec![rank]),
            }
        }
        let far = (0..world).map(|a| (0..world).map(|b| far(a, b)).collect()).collect();
        let mut search = Exhaustive { left, far, talk, ranks: Vec::new(), least: known, symmetric };
        search.place(0);
        search.least
    }

    fn place(&mut self, cost: u128) {
        let at = self.ranks.len();
        if cost >= self.least {
            return;
        }
        if at == self.talk.len() {
            self.least = cost;
            return;
        }
        let kinds = if at == 0 && self.symmetric { 1 } else { self.left.len() };
        for kind in 0..kinds {
            let Some(rank) = self.left[kind].pop() else { continue };
            let rank = rank as usize;
            let more: u128 = self.talk[at].iter().map(|(b, weight)| weight * self.far[rank][self.ranks[*b]]).sum();
            self.ranks.push(rank);
            self.place(cost + more);
            self.ranks.pop();
            self.left[kind].push(rank as i32);
        }
    }
}

/// Returns the paths of a tree with these numbers of children, in an order that the seed says.
fn tree(branches: &[usize], seed: u64) -> Vec<String> {
    let mut paths = vec![String::new()];
    for children in &branches[..branches.len() - 1] {
        paths = paths.iter().flat_map(|path| (0..*children).map(move |child| format!("{path}/{child}"))).collect();
    }
    let leaves = branches[branches.len() - 1];
    let mut all: Vec<String> =
        paths.iter().flat_map(|path| vec![path.trim_start_matches('/').to_owned(); leaves]).collect();
    let mut state = seed;
    for at in (1..all.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap(at, (state >> 33) as usize % (at + 1));
    }
    all
}

fn plan_of(locations: &[String], shape: &[usize], traffic: Option<&[u32]>) -> devicemesh::topology::Plan {
    plan(&locations.iter().map(String::as_str).collect::<Vec<_>>(), shape, traffic).unwrap()
}

/// Returns the ways to write a number as a product of sizes, with order.
fn shapes(size: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![size]];
    for first in (2..size).filter(|first| size % first == 0) {
        all.extend(shapes(size / first).into_iter().map(|rest| [vec![first], rest].concat()));
    }
    all
}

/// Returns the weights that the documentation gives where the caller gives none.
fn default_traffic(shape: &[usize]) -> Vec<u64> {
    (0..shape.len()).map(|dim| shape[..=dim].iter().product::<usize>() as u64).collect()
}

#[test]
fn plans_of_even_machines_are_the_best_there_are() {
    let trees: [&[usize]; 13] = [
        &[2, 2],
        &[2, 3],
        &[3, 2],
        &[4, 2],
        &[2, 4],
        &[2, 2, 2],
        &[3, 3],
        &[2, 5],
        &[2, 6],
        &[3, 4],
        &[2, 2, 3],
        &[2, 1, 4],
        &[1, 2, 4],
    ];
    let mut plans = 0;
    for branches in trees {
        for shape in shapes(branches.iter().product()) {
            let rising: Vec<u32> = (0..shape.len() as u32).map(|dim| 10u32.pow(dim)).collect();
            let falling: Vec<u32> = rising.iter().rev().copied().collect();
            let alike: Vec<u32> = (0..shape.len() as u32).map(|dim| 3 + dim * 7 % 4).collect();
            for traffic in [None, Some(&rising), Some(&falling), Some(&alike)] {
                let locations = tree(branches, plans);
                let weights =
                    traffic.map_or(default_traffic(&shape), |traffic| traffic.iter().map(|w| u64::from(*w)).collect());
                let ours = plan_of(&locations, &shape, traffic.map(Vec::as_slice));
                assert_eq!(
                    ours.cost(),
                    cost(&locations, &shape, &weights, &ours.ranks),
                    "{branches:?} {shape:?} {traffic:?}"
                );
                let least = Exhaustive::optimum(&locations, &shape, &weights, ours.cost(), true);
                assert_eq!(ours.cost(), least, "{branches:?} {shape:?} {traffic:?}: {}", ours.report());
                plans += 1;
            }
        }
    }
    println!("{plans} plans, each the best");
}

#[test]
fn plans_of_uneven_machines_are_the_best_there_are() {
    let machines: [&[&str]; 8] = [
        &["a", "a", "a", "b", "b", "b", "b", "b"],
        &["a", "b", "b", "c", "c", "c", "c"],
        &["a", "b", "c", "a", "b", "c", "a", "b", "c", "a"],
        &["r/a", "r/a", "r/a", "s/a", "s/b", "s/b", "s/b", "s/b"],
        &["r/a", "s/a", "s/b", "r/a", "s/b", "s", "r", "r/b", "s"],
        &["a", "b", "c", "d", "e", "f", "a", "b"],
        &["a/x", "a/y", "b/x", "b/y", "c/x", "c/x", "c/x", ""],
        &["a", "a", "a", "a", "a", "a", "b", "b", "b", "c"],
    ];
    let (mut plans, mut uneven) = (0, 0);
    for machine in machines {
        let locations: Vec<String> = machine.iter().map(|path| (*path).to_owned()).collect();
        for shape in (4..=machine.len()).filter(|size| [4, 6, 8, 9].contains(size)).flat_map(shapes) {
            let weights = default_traffic(&shape);
            let ours = plan_of(&locations, &shape, None);
            assert_eq!(ours.cost(), cost(&locations, &shape, &weights, &ours.ranks), "{machine:?} {shape:?}");
            let least = Exhaustive::optimum(&locations, &shape, &weights, ours.cost(), false);
            assert_eq!(ours.cost(), least, "{machine:?} {shape:?}: {}", ours.report());
            plans += 1;
            uneven += usize::from(!ours.is_even());
        }
    }
    println!("{plans} plans, each the best, {uneven} of them uneven");
    assert!(uneven > plans / 2, "machines and shapes that do not fit: {uneven} of {plans}");
}

/// Returns the processor time of this thread so far. A machine that does something else, too, does
/// not change it.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that every Linux has, and a place for its time.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn sixteen_thousand_ranks_in_less_than_fifty_milliseconds() {
    // There are 32 racks of 64 hosts of 8 ranks, dealt out in turn. In a second world, hosts have
    // from 7 to 15 ranks.
    let place = |rank: usize| format!("rack{}/host{}/nvl{}", rank % 32, rank / 32 % 64, rank / 2048 % 2);
    let locations: Vec<String> = (0..16384).map(place).collect();
    let even: Vec<&str> = locations.iter().map(String::as_str).collect();
    let uneven: Vec<&str> = (0..17000).map(|rank| even[rank * 7 % 16001]).collect();
    let none: Vec<&str> = vec![""; 16384];
    let limit = if cfg!(debug_assertions) { Duration::from_secs(2) } else { Duration::from_millis(50) };
    for (paths, shape) in [
        (&even, &[16, 64, 2, 8][..]),
        (&even, &[2; 14]),
        (&even, &[16384]),
        (&uneven, &[16, 64, 2, 8]),
        (&uneven, &[3, 5, 7, 11, 13]),
        (&none, &[16, 1024]),
    ] {
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let began = thread_time();
            let plan = plan(paths, shape, None).unwrap();
            fastest = fastest.min(thread_time() - began);
            assert_eq!(plan.ranks.len(), shape.iter().product::<usize>());
        }
        println!("{shape:?}: {fastest:?}");
        assert!(fastest < limit, "{shape:?} takes {fastest:?} of a processor");
    }
}

#[test]
fn a_large_even_machine_gets_boxes() {
    // There are 4 racks of 8 hosts of 8 ranks, dealt out over the hosts in turn. Tensor
    // parallelism is in a host, context parallelism in a rack.
    let locations: Vec<String> = (0..256).map(|rank| format!("rack{}/host{}", rank % 32 / 8, rank % 32)).collect();
    let plan = plan_of(&locations, &[4, 8, 8], None);
    let crossing: Vec<Vec<usize>> =
        plan.dims.iter().map(|dim| dim.levels.iter().map(|level| level.most_domains).collect()).collect();
    assert_eq!(crossing, [vec![4, 4], vec![1, 8], vec![1, 1]]);
    assert!(plan.is_even() && plan.ranks[..8].iter().all(|rank| rank % 32 == plan.ranks[0] % 32));
    // Ranks that lie as they should stay where they are.
    let sorted: Vec<String> = (0..256).map(|rank| format!("rack{}/host{}", rank / 64, rank / 8)).collect();
    assert_eq!(plan_of(&sorted, &[4, 8, 8], None).ranks, (0..256).collect::<Vec<i32>>());
}

#[test]
fn spare_ranks_are_those_that_do_not_fit() {
    // Three hosts have 5, 4 and 7 working GPUs, and tensor parallelism is over 4. Each group gets
    // a host, and no group crosses.
    let places: Vec<String> = (0..16)
        .map(|rank| {
            if rank < 5 {
                "a"
            } else if rank < 9 {
                "b"
            } else {
                "c"
            }
            .to_owned()
        })
        .collect();
    let plan = plan_of(&places, &[3, 4], None);
    assert_eq!((plan.dims[1].levels[0].crossing_groups, plan.is_even()), (0, true), "{}", plan.report());
    assert!(plan.identity_cost > plan.cost());
}

fn worlds() -> impl Strategy<Value = (Vec<String>, Vec<usize>, Option<Vec<u32>>)> {
    let path = prop::collection::vec(0..3u8, 0..4)
        .prop_map(|parts| parts.iter().map(u8::to_string).collect::<Vec<_>>().join("/"));
    (prop::collection::vec(1..5usize, 0..4), 0..6usize).prop_flat_map(move |(shape, spare)| {
        let world = shape.iter().product::<usize>() + spare;
        let traffic = prop::option::of(prop::collection::vec(prop_oneof![0..100u32, Just(u32::MAX)], shape.len()));
        (prop::collection::vec(path.clone(), world), Just(shape), traffic)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_is_of_different_ranks_costs_what_it_says_and_no_more_than_before((locations, shape, traffic) in worlds()) {
        let plan = plan_of(&locations, &shape, traffic.as_deref());
        let mut ranks = plan.ranks.clone();
        ranks.sort_unstable();
        ranks.dedup();
        prop_assert_eq!(ranks.len(), shape.iter().product::<usize>());
        prop_assert!(ranks.iter().all(|rank| (*rank as usize) < locations.len()));
        let weights = traffic.as_ref().map_or(default_traffic(&shape), |traffic| traffic.iter().map(|w| u64::from(*w)).collect());
        prop_assert_eq!(plan.cost(), cost(&locations, &shape, &weights, &plan.ranks));
        let identity: Vec<i32> = (0..plan.ranks.len() as i32).collect();
        prop_assert_eq!(plan.identity_cost, cost(&locations, &shape, &weights, &identity));
        prop_assert!(plan.cost() <= plan.identity_cost);
        // Each rank of a job gets one plan. The names of the domains do not matter.
        let renamed: Vec<String> = locations.iter().map(|path| path.replace('0', "zero").replace('2', "a")).collect();
        prop_assert_eq!(&plan_of(&renamed, &shape, traffic.as_deref()), &plan);
        let report: serde_json::Value = serde_json::from_str(&plan.report()).unwrap();
        prop_assert_eq!(&report["even"], plan.is_even());
        prop_assert_eq!(report["dimensions"].as_array().unwrap().len(), shape.len());
        for (dim, told) in plan.dims.iter().zip(report["dimensions"].as_array().unwrap()) {
            prop_assert_eq!(&told["size"], dim.size);
            prop_assert_eq!(told["pairs"].as_array().unwrap().len(), plan.domains.len());
        }
    }
}

#[test]
fn what_is_wrong_is_said_with_its_values() {
    let refused = |locations: &[&str], shape: &[usize], traffic: Option<&[u32]>| {
        plan(locations, shape, traffic).unwrap_err().message().to_owned()
    };
    assert_eq!(refused(&["a"; 3], &[2, 2], None), "a mesh of shape (2, 2) has 4 ranks, but there are 3 locations");
    assert_eq!(refused(&["a"; 3], &[2], Some(&[1, 1])), "2 traffic weights for 1 dimensions");
    for (path, at) in [("/a", 0), ("a/", 1), ("a//b", 1), ("/", 0)] {
        let said = format!("locations[1] is {path:?}: component {at} is empty; a path is like \"rack1/host3/nvl0\"");
        assert_eq!(refused(&["a", path], &[2], None), said);
    }
    let deep = vec!["x"; MAX_LEVELS + 1].join("/");
    assert_eq!(refused(&[&deep], &[1], None), "locations[0] has 33 components; at most 32 are allowed");
    assert!(refused(&["a"], &[0], None).contains("has size 0"));
}
