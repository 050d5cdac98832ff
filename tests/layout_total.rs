//! The layout functions never panic and never wrap a product, whatever the numbers are. Where they
//! answer, the laws of the layout hold.

use devicemesh::layout::{Dim, Pair, Subrange, complement, covers, is_disjoint, row_major};
use proptest::prelude::*;

/// Returns a size or stride. It is mostly small, sometimes at an edge of its type, and sometimes
/// any number.
fn number() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 1..7usize,
        1 => prop::sample::select(vec![0, 1, usize::MAX, usize::MAX / 2, usize::MAX / 2 + 1, 1 << 32, (1 << 32) - 1, 1 << 63]),
        1 => (0..64u32).prop_map(|bit| 1usize << bit),
        1 => any::<usize>(),
    ]
}

fn wild_pairs() -> impl Strategy<Value = Vec<Pair>> {
    prop::collection::vec((number(), number()), 0..5)
}

/// Returns digits of one number, as the dimensions of meshes are, and that number. The digits are
/// factors of a small shape, in any order, and some are left out.
fn digits() -> impl Strategy<Value = (Vec<Pair>, usize)> {
    let shape = prop::collection::vec((1..5usize, any::<bool>(), any::<u32>()), 1..6);
    shape.prop_map(|factors| {
        let (mut stride, mut pairs) = (1, Vec::new());
        for (size, taken, order) in factors {
            if taken {
                pairs.push((order, (size, stride)));
            }
            stride *= size;
        }
        pairs.sort_unstable();
        (pairs.into_iter().map(|(_, pair)| pair).collect(), stride)
    })
}

/// Returns the positions that a list of pairs visits, starting from 0.
fn visited(pairs: &[Pair]) -> Vec<usize> {
    pairs.iter().fold(vec![0], |all, (size, stride)| {
        all.iter().flat_map(|at| (0..*size).map(move |step| at + step * stride)).collect()
    })
}

fn sorted(mut list: Vec<usize>) -> Vec<usize> {
    list.sort_unstable();
    list
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

    #[test]
    fn shapes(shape in prop::collection::vec(number(), 0..6)) {
        let product = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        match row_major(&shape) {
            Ok(dims) => {
                prop_assert_eq!(dims.iter().map(Dim::size).collect::<Vec<_>>(), shape.clone());
                prop_assert_eq!(Dim::join(&dims).unwrap().size(), product.unwrap());
                // All dimensions together count through all positions.
                let last = product.unwrap() - 1;
                prop_assert_eq!(Dim::join(&dims).unwrap().offset(last), last);
                prop_assert_eq!(dims.iter().map(|dim| dim.offset(dim.size() - 1)).sum::<usize>(), last);
            }
            Err(error) => prop_assert!(shape.contains(&0) || product.is_none(), "({:?}) is a shape: {}", shape, error),
        }
    }

    #[test]
    fn wild_dimensions(pairs in wild_pairs(), index in number(), position in number(), sizes in prop::collection::vec(number(), 0..5)) {
        let steps = pairs.iter().try_fold(1usize, |product, pair| product.checked_mul(pair.0));
        let Ok(dim) = Dim::new(&pairs) else {
            let reach = pairs.iter().try_fold(0usize, |sum, (size, stride)| sum.checked_add(size.checked_sub(1)?.checked_mul(*stride)?));
            let still = pairs.iter().any(|(size, stride)| *size == 0 || *stride == 0 && *size > 1);
            prop_assert!(steps.is_none() || reach.is_none() || still || !is_disjoint(&pairs), "{:?} is a dimension", pairs);
            return Ok(());
        };
        prop_assert_eq!(Some(dim.size()), steps);
        prop_assert!(dim.pairs().iter().all(|(size, _)| *size > 1), "coalesced");
        prop_assert_eq!(&Dim::new(dim.pairs()).unwrap(), &dim);
        prop_assert_eq!(dim.offset(0), 0);
        prop_assert_eq!(dim.offset(index), dim.offset(index % dim.size()), "indices past the end wrap");
        prop_assert!(dim.coordinate(position) < dim.size());
        let (base, step) = (dim.base(position), dim.coordinate(position));
        prop_assert_eq!(base.checked_add(dim.offset(step)), Some(position));
        prop_assert_eq!((dim.coordinate(base), dim.coordinate(dim.offset(index))), (0, index % dim.size()));
        if let Ok(parts) = dim.split(&sizes) {
            prop_assert_eq!(parts.iter().map(Dim::size).collect::<Vec<_>>(), sizes.clone());
            prop_assert_eq!(&Dim::join(&parts).unwrap(), &dim);
        }
        prop_assert!(dim.split(&[dim.size()]).is_ok() && dim.split(&[1, dim.size(), 1]).is_ok());
    }

    #[test]
    fn wild_pairs_are_refused_or_right(
        whole in wild_pairs(),
        part in wild_pairs(),
        space in number(),
        range in (number(), number(), number()),
    ) {
        is_disjoint(&whole);
        covers(&whole, &part);
        if let Ok(rest) = complement(&whole, &part) {
            // The steps that are left, times the steps that were taken, are all steps.
            let steps = |pairs: &[Pair]| pairs.iter().try_fold(1usize, |product, pair| product.checked_mul(pair.0));
            let together = steps(&rest).and_then(|rest| rest.checked_mul(steps(&part)?));
            prop_assert_eq!(together, steps(&whole), "{:?} without {:?} is {:?}", whole, part, rest);
        }
        let (start, len, step) = range;
        if let Ok(dim) = Dim::new(&part) {
            if let Ok(range) = Subrange::new(space, &dim, start, len, step) {
                let last = range.size() - 1;
                prop_assert!(range.outer(last) < space);
                prop_assert_eq!(range.inner(range.outer(last)), Some(last));
            }
        }
    }

    #[test]
    fn dimensions_of_a_mesh((pairs, space) in digits(), sizes in prop::collection::vec(1..5usize, 1..4)) {
        prop_assert!(is_disjoint(&pairs));
        let dim = Dim::new(&pairs).unwrap();
        let walk: Vec<usize> = (0..dim.size()).map(|index| dim.offset(index)).collect();
        prop_assert_eq!(&walk, &visited(&pairs), "the walk is that of the pairs, the last fastest");
        prop_assert!(walk.iter().all(|offset| *offset < space));
        for position in 0..space {
            let (coordinate, base) = (dim.coordinate(position), dim.base(position));
            prop_assert_eq!(base + dim.offset(coordinate), position, "coordinate and base say where a position is");
            prop_assert_eq!((dim.coordinate(base), dim.base(base)), (0, base));
        }
        let inner: usize = sizes.iter().product();
        let whole = [&[dim.size() / inner], &sizes[..]].concat();
        match dim.split(&whole) {
            Ok(parts) => {
                prop_assert_eq!(parts.iter().map(Dim::size).product::<usize>(), dim.size());
                prop_assert_eq!(&Dim::join(&parts).unwrap(), &dim);
                let pairs: Vec<Pair> = parts.iter().flat_map(|part| part.pairs().iter().copied()).collect();
                prop_assert!(is_disjoint(&pairs) && covers(dim.pairs(), &pairs));
            }
            // A split has no strides only where a boundary falls inside a step. A single pair has
            // no such boundary.
            Err(_) => prop_assert!(whole.iter().product::<usize>() != dim.size() || dim.pairs().len() > 1),
        }
    }

    #[test]
    fn parts_and_their_complements((part, space) in digits(), (other, _) in digits()) {
        let whole = [(space, 1)];
        prop_assert!(covers(&whole, &part));
        let rest = complement(&whole, &part).unwrap();
        prop_assert!(is_disjoint(&rest));
        // Both together visit each position once.
        let both = visited(&[rest.as_slice(), part.as_slice()].concat());
        prop_assert_eq!(sorted(both), (0..space).collect::<Vec<_>>(), "{:?} and {:?}", part, rest);
        // The complement of the complement is the part, as a set.
        let back = complement(&whole, &rest).unwrap();
        prop_assert_eq!(sorted(visited(&back)), sorted(visited(&part)));
        // A part that is covered divides the number of steps, and visits only positions of the
        // whole.
        if covers(&part, &other) && is_disjoint(&other) {
            let (steps, places) = (visited(&part).len(), sorted(visited(&part)));
            prop_assert_eq!(steps % visited(&other).len(), 0);
            prop_assert!(visited(&other).iter().all(|position| places.binary_search(position).is_ok()));
            prop_assert_eq!(visited(&complement(&part, &other).unwrap()).len() * visited(&other).len(), steps);
        }
    }
}
