//! Fills a mesh from a line of ranks by boxes that nest as the domains do.

use std::collections::BTreeMap;

use super::locations::Topology;
use crate::layout::{Dim, Pair};

/// The most states that are kept for a level. Meshes of a few dimensions have fewer states, and
/// then the boxes are the cheapest that exist.
const MAX_KEPT: usize = 256;
/// The most states that are tried for a level.
const MAX_TRIED: usize = 1 << 14;

/// A box that each domain of a level may hold.
struct State {
    /// The sides of the box, one for each dimension.
    sides: Vec<usize>,
    /// The cost of this level and all levels before it.
    cost: u128,
    /// The index of the box around this one among the states of the level before.
    outer: usize,
}

/// Returns how to walk a line of ranks so that the mesh falls into equal boxes, one for each
/// domain, which nest as the domains do. The result has, for each dimension of the mesh, the steps
/// along the line.
///
/// At each level the sizes of the domains in the line have a greatest common divisor. Every domain
/// is a row of parts of that size. Parts nest, because the size of a domain is the sum of the sizes
/// of those inside it. When each part is a box of sides a[d], a group along d has size[d] / a[d]
/// parts, and adds `traffic[d] * ranks * (size[d] - a[d]) * ranks / size[d]` to the cost. The sides
/// that the level inside can have depend only on those of the level around it. So the cheapest
/// boxes are a shortest path, level by level.
///
/// An example is two hosts of four ranks and a mesh (4, 2). When the second dimension talks more,
/// each host holds a box of (2, 2) and the mesh is filled row-major. When the first dimension talks
/// more, the boxes are (4, 1), and the second dimension goes from host to host, 4 ranks along the
/// line.
pub(super) fn walk(topology: &Topology, line: &[i32], shape: &[usize], weights: &[u64]) -> Vec<Dim> {
    let mut levels = vec![vec![State { sides: shape.to_vec(), cost: 0, outer: 0 }]];
    // Boxes that keep the dimension with the most traffic whole are tried first. So the boxes that
    // a limit leaves untried are expensive ones. A dimension of size 1 has one side only.
    let mut dims: Vec<usize> = (0..shape.len()).filter(|dim| shape[*dim] > 1).collect();
    dims.sort_by_key(|dim| std::cmp::Reverse(weights[*dim]));
    let mut part = line.len();
    for level in 0..topology.levels() {
        let runs = line.chunk_by(|a, b| topology.domain(level, *a) == topology.domain(level, *b));
        part = runs.fold(part, |part, run| gcd(part, run.len()));
        let before = &levels[levels.len() - 1];
        let mut reached: BTreeMap<Vec<usize>, (u128, usize)> = BTreeMap::new();
        let mut tried = 0;
        for (outer, state) in before.iter().enumerate() {
            let mut sides = state.sides.clone();
            inside(&state.sides, &dims, part, &mut sides, &mut |sides| {
                tried += 1;
                let crossing = |dim: usize| (shape[dim] - sides[dim]) as u128 * (line.len() / shape[dim]) as u128;
                let cost = (0..shape.len()).map(|dim| u128::from(weights[dim]) * crossing(dim)).sum::<u128>();
                let cost = state.cost + cost;
                let best = reached.entry(sides.to_vec()).or_insert((cost, outer));
                *best = (*best).min((cost, outer));
                tried < MAX_TRIED
            });
            if tried >= MAX_TRIED {
                break;
            }
        }
        let mut states: Vec<State> =
            reached.into_iter().map(|(sides, (cost, outer))| State { sides, cost, outer }).collect();
        states.sort_by(|a, b| a.cost.cmp(&b.cost).then_with(|| a.sides.cmp(&b.sides)));
        states.truncate(MAX_KEPT);
        levels.push(states);
    }
    // The boxes from the innermost level outwards: first the sides of the cheapest box, then those
    // of the boxes around it.
    let mut chosen = vec![vec![1; shape.len()]];
    let mut at = 0;
    for states in levels.iter().rev() {
        chosen.push(states[at].sides.clone());
        at = states[at].outer;
    }
    steps(&chosen, shape.len())
}

/// Calls `found` with every way to choose a divisor of each side so that the product is `part`,
/// until `found` returns false.
fn inside(
    outer: &[usize],
    dims: &[usize],
    part: usize,
    sides: &mut Vec<usize>,
    found: &mut impl FnMut(&[usize]) -> bool,
) -> bool {
    let Some((&dim, rest)) = dims.split_first() else { return found(sides) };
    let most = gcd(outer[dim], part);
    // The other sides must make up the rest of the part, which is `part / side`. They can do so
    // exactly when the rest divides their product, because each prime factor can be dealt with
    // alone.
    let offered = rest.iter().fold(1, |product, dim| product * outer[*dim]);
    for side in (1..=most).rev().filter(|side| most % side == 0 && offered % (part / side) == 0) {
        sides[dim] = side;
        if !inside(outer, rest, part / side, sides, found) {
            return false;
        }
    }
    true
}

/// Returns the digits of the line, the nearest first. At each level the boxes inside a box are
/// counted row-major.
fn steps(chosen: &[Vec<usize>], ndim: usize) -> Vec<Dim> {
    let mut pairs: Vec<Vec<Pair>> = vec![Vec::new(); ndim];
    let mut stride = 1;
    for two in chosen.windows(2) {
        for dim in (0..ndim).rev() {
            let count = two[1][dim] / two[0][dim];
            pairs[dim].insert(0, (count, stride));
            stride *= count;
        }
    }
    pairs.iter().map(|pairs| Dim::known(pairs)).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_follow_the_weights() {
        let topology = Topology::new(&["a", "a", "a", "a", "b", "b", "b", "b"]).unwrap();
        let line: Vec<i32> = (0..8).collect();
        let pairs = |weights: &[u64]| {
            let walk = walk(&topology, &line, &[4, 2], weights);
            walk.iter().map(|dim| dim.pairs().to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(pairs(&[1, 10]), [[(4, 2)], [(2, 1)]]);
        assert_eq!(pairs(&[10, 1]), [[(4, 1)], [(2, 4)]]);
    }

    #[test]
    fn sides_multiply_to_the_part_and_divide_what_is_around() {
        let mut found = Vec::new();
        inside(&[4, 6], &[1, 0], 12, &mut vec![4, 6], &mut |sides| {
            found.push(sides.to_vec());
            true
        });
        assert_eq!(found, [[2, 6], [4, 3]]);
    }

    #[test]
    fn a_limit_leaves_boxes_all_the_same() {
        // There are 16 dimensions of 2 over domains of 2^12, 2^8 and 2^4. The first level has (16
        // over 4) = 1820 boxes, and the next one has more than are kept or tried.
        let path = |rank: usize| format!("{}/{}/{}", rank >> 12, rank >> 8, rank >> 4);
        let locations: Vec<String> = (0..1 << 16).map(path).collect();
        let topology = Topology::new(&locations.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let line: Vec<i32> = (0..1 << 16).collect();
        let walk = walk(&topology, &line, &[2; 16], &[1; 16]);
        let mut strides: Vec<usize> = walk.iter().map(|dim| dim.pairs()[0].1).collect();
        strides.sort_unstable();
        assert_eq!(strides, (0..16).map(|power| 1 << power).collect::<Vec<usize>>());
    }
}
