//! Lists of pairs as sets of digits: a pair (size, stride) is the digit `position / stride % size` of a position, so it occupies the
//! places from `stride` up to `size * stride` of a mixed-radix number.

use super::dim::{Dim, Pair};
use crate::error::{Error, Result};

/// The dimensions of a row-major array of that shape.
///
/// ```
/// use devicemesh::layout::row_major;
/// let dims = row_major(&[2, 3, 4]).unwrap();
/// assert_eq!(dims.iter().map(|dim| dim.pairs()[0]).collect::<Vec<_>>(), [(2, 12), (3, 4), (4, 1)]);
/// assert!(row_major(&[2, 0]).is_err());
/// assert!(row_major(&[usize::MAX, 2]).is_err());
/// ```
pub fn row_major(shape: &[usize]) -> Result<Vec<Dim>> {
    if let Some(index) = shape.iter().position(|size| *size == 0) {
        return Err(Error::invalid(format!("dimension {index} has size 0; each size is at least 1")));
    }
    let mut stride = 1usize;
    let mut dims = Vec::with_capacity(shape.len());
    for &size in shape.iter().rev() {
        dims.push(Dim::new(&[(size, stride)]));
        stride = stride.checked_mul(size).ok_or_else(|| {
            Error::invalid(format!(
                "the product of shape ({}) is larger than 2^64",
                shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
            ))
        })?;
    }
    dims.reverse();
    Ok(dims)
}

/// Whether no two of these pairs share a digit and all divide one number: then together they visit each position once.
///
/// ```
/// use devicemesh::layout::is_disjoint;
/// assert!(is_disjoint(&[(2, 4), (4, 1)]));
/// assert!(!is_disjoint(&[(2, 4), (8, 1)]));   // both move by 4
/// assert!(!is_disjoint(&[(2, 1), (2, 3)]));   // digits of 2 x 3 and of 3 x 2: their groups would cut across each other
/// ```
pub fn is_disjoint(pairs: &[Pair]) -> bool {
    let mut sorted: Vec<Pair> = pairs.iter().copied().filter(|(size, _)| *size > 1).collect();
    sorted.sort_by_key(|(_, stride)| *stride);
    sorted.windows(2).all(|two| two[1].1 % (two[0].0 * two[0].1) == 0)
}

/// Whether every digit of `part` is among the digits of `whole`.
///
/// ```
/// use devicemesh::layout::covers;
/// assert!(covers(&[(2, 4), (2, 2)], &[(4, 2)]));
/// assert!(!covers(&[(2, 4), (2, 1)], &[(4, 2)]));
/// assert!(!covers(&[(6, 1)], &[(2, 2)])); // of 12 as 3 x 2 x 2: from position 4 it walks to 6, outside 0..6
/// ```
pub fn covers(whole: &[Pair], part: &[Pair]) -> bool {
    part.iter().all(|&(size, stride)| {
        let end = size * stride;
        let mut at = stride;
        while at < end {
            let holds = |pair: &&Pair| pair.1 <= at && at < pair.0 * pair.1 && at % pair.1 == 0;
            let Some(pair) = whole.iter().find(holds) else { return false };
            let next = end.min(pair.0 * pair.1);
            // A digit that ends inside a pair must divide it, or its walk would leave the pair's ranks.
            if (pair.0 * pair.1) % next != 0 {
                return false;
            }
            at = next;
        }
        true
    })
}

/// The digits of `whole` that are not in `part`, in the order of `whole`. `part` is covered by it.
///
/// ```
/// use devicemesh::layout::complement;
/// assert_eq!(complement(&[(2, 8), (2, 4), (4, 1)], &[(2, 4)]), [(2, 8), (4, 1)]);
/// assert_eq!(complement(&[(16, 1)], &[(2, 4)]), [(2, 8), (4, 1)]);
/// ```
pub fn complement(whole: &[Pair], part: &[Pair]) -> Vec<Pair> {
    let mut rest = Vec::new();
    for &(size, stride) in whole {
        let end = size * stride;
        let mut cuts: Vec<usize> = part.iter().flat_map(|pair| [pair.1, pair.0 * pair.1]).collect();
        cuts.retain(|cut| stride < *cut && *cut < end);
        cuts.extend([stride, end]);
        cuts.sort_unstable();
        cuts.dedup();
        for two in cuts.windows(2).rev() {
            let inside = |pair: &Pair| pair.1 <= two[0] && two[1] <= pair.0 * pair.1;
            if two[0] < two[1] && !part.iter().any(inside) {
                rest.push((two[1] / two[0], two[0]));
            }
        }
    }
    rest
}
