//! Lists of pairs as sets of digits. A pair (size, stride) is the digit `position / stride % size`
//! of a position, so it occupies the places from `stride` up to `size * stride` of a mixed-radix
//! number.

use crate::error::{Error, Result};

/// `size` steps of `stride` positions.
pub type Pair = (usize, usize);

/// Whether no two of these pairs share a digit and all divide one number. Then the pairs together
/// visit each position once.
///
/// ```
/// use devicemesh::layout::is_disjoint;
/// assert!(is_disjoint(&[(2, 4), (4, 1)]));
/// assert!(!is_disjoint(&[(2, 4), (8, 1)]));   // both move by 4
/// assert!(!is_disjoint(&[(2, 1), (2, 3)]));   // digits of 2 x 3 and of 3 x 2: their groups would cut across each other
/// assert!(!is_disjoint(&[(2, 0)]));           // stays where it is
/// assert!(!is_disjoint(&[(0, 2)]));           // visits nothing
/// ```
pub fn is_disjoint(pairs: &[Pair]) -> bool {
    let mut sorted: Vec<Pair> = pairs.iter().copied().filter(|(size, _)| *size != 1).collect();
    sorted.sort_by_key(|(_, stride)| *stride);
    // A pair of size or stride 0 is no digit, and a pair that ends beyond 2^64 divides nothing.
    let divides = |inner: &Pair, stride: usize| end(inner).is_some_and(|end| stride % end == 0);
    sorted.iter().all(|(size, stride)| *size > 0 && *stride > 0)
        && sorted.windows(2).all(|two| divides(&two[0], two[1].1))
}

/// Whether every digit of `part` is among the digits of `whole`.
///
/// ```
/// use devicemesh::layout::covers;
/// assert!(covers(&[(2, 4), (2, 2)], &[(4, 2)]));
/// assert!(!covers(&[(2, 4), (2, 1)], &[(4, 2)]));
/// // In a mesh of 12 positions, (2, 2) leads from position 4 to 6, which is not in 0..6.
/// assert!(!covers(&[(6, 1)], &[(2, 2)]));
/// ```
pub fn covers(whole: &[Pair], part: &[Pair]) -> bool {
    part.iter().filter(|(size, _)| *size != 1).all(|pair| covers_pair(whole, pair).is_some())
}

fn covers_pair(whole: &[Pair], part: &Pair) -> Option<()> {
    let last = end(part)?;
    let mut at = part.1;
    if at == 0 || last == 0 {
        return None;
    }
    while at < last {
        let holds =
            |pair: &&Pair| pair.1 > 0 && pair.1 <= at && end(pair).is_some_and(|end| at < end) && at % pair.1 == 0;
        let pair_end = end(whole.iter().find(holds)?)?;
        let next = last.min(pair_end);
        // A digit that ends inside a pair must divide it, or its walk would leave the pair's ranks.
        if pair_end % next != 0 {
            return None;
        }
        at = next;
    }
    Some(())
}

/// Returns the digits of `whole` that are not in `part`, in the order of `whole`. Fails when `part`
/// has a digit that `whole` lacks.
///
/// ```
/// use devicemesh::layout::complement;
/// assert_eq!(complement(&[(2, 8), (2, 4), (4, 1)], &[(2, 4)]).unwrap(), [(2, 8), (4, 1)]);
/// assert_eq!(complement(&[(16, 1)], &[(2, 4)]).unwrap(), [(2, 8), (4, 1)]);
/// assert!(complement(&[(16, 1)], &[(2, 16)]).is_err());
/// ```
pub fn complement(whole: &[Pair], part: &[Pair]) -> Result<Vec<Pair>> {
    let foreign = || Error::invalid(format!("the (size, stride) pairs {part:?} are not part of the layout {whole:?}"));
    if !(covers(whole, part) && is_disjoint(whole) && is_disjoint(part)) {
        return Err(foreign());
    }
    let mut rest = Vec::new();
    for pair in whole.iter().filter(|(size, _)| *size > 1) {
        let (stride, last) = (pair.1, end(pair).ok_or_else(foreign)?);
        let part = part.iter().filter(|(size, _)| *size > 1);
        let mut cuts: Vec<usize> = part.clone().flat_map(|pair| [pair.1, pair.0 * pair.1]).collect();
        cuts.retain(|cut| stride < *cut && *cut < last);
        cuts.extend([stride, last]);
        cuts.sort_unstable();
        cuts.dedup();
        for two in cuts.windows(2).rev() {
            let inside = |pair: &Pair| pair.1 <= two[0] && two[1] <= pair.0 * pair.1;
            if !part.clone().any(inside) {
                if two[1] % two[0] != 0 {
                    return Err(foreign());
                }
                rest.push((two[1] / two[0], two[0]));
            }
        }
    }
    Ok(rest)
}

/// Returns the place at which a digit ends, or `None` when it is beyond 2^64.
fn end(pair: &Pair) -> Option<usize> {
    pair.0.checked_mul(pair.1)
}
