//! Measures the candidates, and finds the cheapest.

use super::boxes;
use super::cost::Meter;
use super::lines::lines;
use super::locations::Topology;
use super::swaps;
use crate::layout::Dim;

/// The most steps of measuring in all, unless the first [`ALWAYS`] candidates take more. One
/// measurement takes levels * dimensions * ranks steps.
const MAX_STEPS: usize = 2_000_000;
/// How many candidates are measured however many steps that takes.
const ALWAYS: usize = 4;
/// The number of candidates that swaps start from.
const MAX_KEPT: usize = 8;
/// Up to this many dimensions are tried in every order.
const MAX_PERMUTED: usize = 5;

/// Returns the cheapest rank array that was found, and the cost of ranks 0 to n - 1.
pub(super) fn best(topology: &Topology, shape: &[usize], weights: &[u64], meter: &mut Meter<'_>) -> (Vec<i32>, u128) {
    let size: usize = shape.iter().product();
    let identity: Vec<i32> = (0..size as i32).collect();
    let identity_cost = meter.measure(&identity).iter().map(|dim| dim.cost).sum();
    let mut search = Search { kept: vec![(identity_cost, identity)], tried: 0 };
    let most = if swaps::is_small(topology) { MAX_KEPT } else { 1 };
    let lines = lines(topology, size, &units(shape, weights));
    let orders = orders(shape, weights);
    let steps = (topology.levels() * shape.len() * size).max(1);
    let walks = lines.iter().map(|line| (line, boxes::walk(topology, line, shape, weights)));
    let permuted = orders.iter().flat_map(|order| lines.iter().map(move |line| (line, row_major_in(shape, order))));
    for (line, walk) in walks.chain(permuted) {
        if search.kept[0].0 == 0 || (search.tried >= ALWAYS && search.tried.saturating_mul(steps) > MAX_STEPS) {
            break;
        }
        search.offer(fill(line, shape, &walk), most, meter);
    }
    (swaps::improved(topology, shape, weights, search.kept), identity_cost)
}

/// The search for the cheapest candidate.
struct Search {
    /// The cheapest candidates with their costs. The cheapest one comes first, and of equal ones
    /// the one that was found first.
    kept: Vec<(u128, Vec<i32>)>,
    /// How many candidates were measured.
    tried: usize,
}

impl Search {
    /// Keeps a candidate that is among the `most` cheapest.
    fn offer(&mut self, ranks: Vec<i32>, most: usize, meter: &mut Meter<'_>) {
        self.tried += 1;
        let bound = self.kept.get(most - 1).map_or(u128::MAX, |(worst, _)| *worst);
        let Some(cost) = meter.cost_below(&ranks, bound) else { return };
        if self.kept.iter().all(|(known, same)| *known != cost || *same != ranks) {
            let at = self.kept.partition_point(|(known, _)| *known <= cost);
            self.kept.insert(at, (cost, ranks));
            self.kept.truncate(most);
        }
    }
}

/// Returns the ranks of the line at the positions of the mesh, row-major.
fn fill(line: &[i32], shape: &[usize], walk: &[Dim]) -> Vec<i32> {
    let mut places = vec![0];
    for (size, dim) in shape.iter().zip(walk) {
        let offsets: Vec<usize> = (0..*size).map(|index| dim.offset(index)).collect();
        places = places.iter().flat_map(|place| offsets.iter().map(move |offset| place + offset)).collect();
    }
    places.iter().map(|place| line[*place]).collect()
}

/// Returns numbers of ranks that should stay together, the largest first: the size of each
/// dimension, and the product of the sizes of the dimensions with the most traffic.
fn units(shape: &[usize], weights: &[u64]) -> Vec<usize> {
    let mut product = 1;
    let mut units: Vec<usize> = by_weight(shape, weights)
        .iter()
        .rev()
        .map(|dim| {
            product *= shape[*dim];
            product
        })
        .chain(shape.iter().copied())
        .filter(|unit| *unit > 1)
        .collect();
    units.sort_unstable_by(|a, b| b.cmp(a));
    units.dedup();
    units
}

/// Orders the dimensions by traffic. The one with the most traffic comes last, as the fastest one.
fn by_weight(shape: &[usize], weights: &[u64]) -> Vec<usize> {
    let mut dims: Vec<usize> = (0..shape.len()).collect();
    dims.sort_by_key(|dim| weights[*dim]);
    dims
}

/// Returns orders of the dimensions, the slowest first: the order by weight, and all others when
/// there are few. Dimensions of size 1 are left out.
fn orders(shape: &[usize], weights: &[u64]) -> Vec<Vec<usize>> {
    let (first, ones): (Vec<usize>, Vec<usize>) =
        by_weight(shape, weights).into_iter().partition(|dim| shape[*dim] > 1);
    let mut orders = vec![first];
    if orders[0].len() <= MAX_PERMUTED {
        permutations(&orders[0].clone(), 0, &mut orders);
    }
    orders.iter_mut().for_each(|order| order.extend(&ones));
    orders
}

fn permutations(order: &[usize], from: usize, all: &mut Vec<Vec<usize>>) {
    if from == order.len() && order != all[0] {
        all.push(order.to_vec());
    }
    for index in from..order.len() {
        let mut next = order.to_vec();
        next.swap(from, index);
        permutations(&next, from + 1, all);
    }
}

/// Returns a row-major walk with the dimensions in that order.
fn row_major_in(shape: &[usize], order: &[usize]) -> Vec<Dim> {
    let mut walk = vec![Dim::known(&[]); shape.len()];
    let mut stride = 1;
    for &dim in order.iter().rev() {
        walk[dim] = Dim::known(&[(shape[dim], stride)]);
        stride *= shape[dim];
    }
    walk
}
