//! Orders of the world's ranks in which the ranks of a domain are neighbours.

use super::locations::Topology;

/// The most orders that are tried, because more have not helped.
const MAX_LINES: usize = 16;

/// Returns the first `size` ranks of each order that is worth a try. All lines differ.
///
/// The domains are in the order of their first ranks, or the large ones come first. When domains do
/// not divide by a number of ranks that should stay together (`units`), there are two more orders:
/// the whole units of each domain of a level come first, and the rest of them at the end.
///
/// With hosts of 3 and 5 ranks and a unit of 2 there are four lines:
///
/// - 0 1 2, 3 4 5 6 7: the hosts in the order of their first ranks
/// - 3 4 5 6 7, 0 1 2: the larger host first
/// - 3 4 5 6, 0 1, 7 2: the whole units of each host, the larger host first, and then the rest
/// - 0 1, 3 4 5 6, 2 7: the whole units of each host in the first order, and then the rest
pub(super) fn lines(topology: &Topology, size: usize, units: &[usize]) -> Vec<Vec<i32>> {
    let mut lines: Vec<Vec<i32>> = Vec::new();
    let mut keep = |line: &[i32]| {
        let line = line[..size].to_vec();
        if lines.len() < MAX_LINES && !lines.contains(&line) {
            lines.push(line);
        }
    };
    let bases = [by_domain(topology, false), by_domain(topology, true)];
    bases.iter().for_each(|base| keep(base));
    for base in bases.iter().rev() {
        for level in (0..topology.levels()).rev() {
            for &unit in units {
                keep(&whole_units(topology, base, level, unit));
            }
        }
    }
    lines
}

fn by_domain(topology: &Topology, large_first: bool) -> Vec<i32> {
    let mut line: Vec<i32> = (0..topology.world_size() as i32).collect();
    let places: Vec<Vec<(usize, u32)>> = (0..topology.levels())
        .map(|level| {
            let mut sizes = vec![0; topology.domains(level)];
            line.iter().for_each(|rank| sizes[topology.domain(level, *rank) as usize] += 1);
            let missing = |size| if large_first { topology.world_size() - size } else { 0 };
            let by_rank = |rank| {
                let domain = topology.domain(level, rank);
                (missing(sizes[domain as usize]), domain)
            };
            (0..topology.world_size() as i32).map(by_rank).collect()
        })
        .collect();
    line.sort_by(|a, b| {
        let mut unlike = places.iter().map(|places| places[*a as usize].cmp(&places[*b as usize]));
        unlike.find(|order| order.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
    });
    line
}

fn whole_units(topology: &Topology, base: &[i32], level: usize, unit: usize) -> Vec<i32> {
    let (mut line, mut rest) = (Vec::with_capacity(base.len()), Vec::new());
    for run in base.chunk_by(|a, b| topology.domain(level, *a) == topology.domain(level, *b)) {
        let (whole, left) = run.split_at(run.len() / unit * unit);
        line.extend_from_slice(whole);
        rest.extend_from_slice(left);
    }
    line.extend(rest);
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_domains_and_units_together() {
        let topology = Topology::new(&["a", "a", "a", "b", "b", "b", "b", "b"]).unwrap();
        let expected =
            [[0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 0, 1, 2], [3, 4, 5, 6, 0, 1, 7, 2], [0, 1, 3, 4, 5, 6, 2, 7]];
        assert_eq!(lines(&topology, 8, &[2]), expected);
        // For a mesh of 4 ranks a line has its first 4. A line that is known already is kept once.
        assert_eq!(lines(&topology, 4, &[2]), [[0, 1, 2, 3], [3, 4, 5, 6], [0, 1, 3, 4]]);
    }
}
