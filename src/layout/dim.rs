//! One dimension of a layout.

use super::digits::{Pair, is_disjoint};
use crate::error::{Error, Result};

/// One dimension as (size, stride) pairs, the most significant first.
///
/// The pairs are kept coalesced: no pair has size 1, and two neighbours that make one longer pair
/// are one. So two dimensions visit the same offsets in the same order exactly when their pairs are
/// equal, and a dimension of size 1 has no pairs.
///
/// ```
/// use devicemesh::layout::Dim;
/// // This dimension joins the first and the last dimension of a (2, 2, 2) mesh, whose strides are
/// // 4, 2 and 1.
/// let dim = Dim::new(&[(2, 4), (2, 1)]).unwrap();
/// assert_eq!((0..dim.size()).map(|index| dim.offset(index)).collect::<Vec<_>>(), [0, 1, 4, 5]);
/// // Adjacent dimensions are one pair: strides 4 and 2 walk 0, 2, 4, 6.
/// assert_eq!(Dim::new(&[(2, 4), (2, 2)]).unwrap().pairs(), [(4, 2)]);
/// assert_eq!(Dim::new(&[(1, 8)]).unwrap().pairs(), []);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Dim {
    /// The number of steps, which is the product of the sizes of the pairs.
    size: usize,
    /// The (size, stride) pairs, coalesced.
    pairs: Vec<Pair>,
}

impl Dim {
    /// Makes the dimension that walks these pairs. The last pair is the fastest.
    ///
    /// It is refused when a size is 0, when several steps have stride 0 (they would stay in place),
    /// when the pairs overlap, so that two coordinates would mean one position or the groups would
    /// cut across each other, and when the number of steps or the furthest offset is larger than a
    /// `usize`.
    ///
    /// ```
    /// use devicemesh::layout::Dim;
    /// assert!(Dim::new(&[(0, 1)]).is_err());
    /// assert!(Dim::new(&[(2, 0)]).is_err());
    /// assert!(Dim::new(&[(2, 1), (2, 1)]).is_err());
    /// assert!(Dim::new(&[(2, usize::MAX), (2, 1)]).is_err());
    /// ```
    pub fn new(pairs: &[Pair]) -> Result<Dim> {
        let (mut size, mut furthest) = (Some(1usize), Some(0usize));
        for &(steps, stride) in pairs {
            if steps == 0 || (stride == 0 && steps > 1) {
                return Err(Error::invalid(format!(
                    "size {steps} with stride {stride} is no dimension: the size must be at least 1, and a size above 1 needs a stride above 0"
                )));
            }
            size = size.and_then(|size| size.checked_mul(steps));
            let span = (steps - 1).checked_mul(stride);
            furthest = furthest.and_then(|furthest| furthest.checked_add(span?));
        }
        match (size, furthest) {
            (Some(_), Some(_)) if is_disjoint(pairs) => Ok(Dim::known(pairs)),
            (Some(_), Some(_)) => Err(Error::invalid(format!(
                "the (size, stride) pairs {pairs:?} overlap: ordered by stride, each stride must be a multiple of size * stride of the pair before it"
            ))),
            _ => Err(Error::invalid(format!("a dimension of (size, stride) {pairs:?} reaches beyond 2^64"))),
        }
    }

    /// Makes the dimension of pairs that come out of a layout that exists, and need no check.
    pub(crate) fn known(pairs: &[Pair]) -> Dim {
        let mut coalesced: Vec<Pair> = Vec::with_capacity(pairs.len());
        for &(size, stride) in pairs.iter().filter(|(size, _)| *size != 1) {
            match coalesced.last_mut() {
                Some(last) if Some(last.1) == size.checked_mul(stride) => *last = (last.0 * size, stride),
                _ => coalesced.push((size, stride)),
            }
        }
        Dim { size: coalesced.iter().map(|(size, _)| size).product(), pairs: coalesced }
    }

    /// Joins these dimensions to one. The last of them is the fastest. The join is refused as in
    /// [`new`](Dim::new).
    ///
    /// ```
    /// use devicemesh::layout::row_major;
    /// use devicemesh::layout::Dim;
    /// let dims = row_major(&[2, 2, 4]).unwrap();
    /// let (dp, cp, tp) = (&dims[0], &dims[1], &dims[2]);
    /// assert_eq!(Dim::join([dp, cp]).unwrap().pairs(), [(4, 4)]);
    /// assert_eq!(Dim::join([dp, tp]).unwrap().pairs(), [(2, 8), (4, 1)]);
    /// assert_eq!(Dim::join([cp, dp]).unwrap().pairs(), [(2, 4), (2, 8)]); // the transposed walk: 0, 8, 4, 12
    /// ```
    pub fn join<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Result<Dim> {
        let pairs: Vec<Pair> = dims.into_iter().flat_map(|dim| dim.pairs.iter().copied()).collect();
        Dim::new(&pairs)
    }

    /// Splits this dimension into several of those sizes. The last of them is the fastest.
    ///
    /// It is refused when the product of the sizes is not this dimension's size, and when a
    /// boundary between two sizes falls inside a step: six ranks that lie as 2 x 3 with a gap
    /// cannot be walked as 3 x 2.
    ///
    /// ```
    /// use devicemesh::layout::Dim;
    /// let dim = Dim::new(&[(8, 2)]).unwrap();
    /// let split = dim.split(&[2, 4]).unwrap();
    /// assert_eq!((split[0].pairs(), split[1].pairs()), (&[(2, 8)][..], &[(4, 2)][..]));
    /// assert!(dim.split(&[3, 3]).is_err());
    /// ```
    pub fn split(&self, sizes: &[usize]) -> Result<Vec<Dim>> {
        let text = || sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let product = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if product != Some(self.size) {
            let product = product.map_or("more than a size can be".to_owned(), |product| product.to_string());
            return Err(Error::invalid(format!(
                "the product of sizes ({}) is {product}, but the dimension has size {}",
                text(),
                self.size
            )));
        }
        let mut left: Vec<Pair> = self.pairs.clone();
        let mut parts = Vec::with_capacity(sizes.len());
        for &size in sizes.iter().rev() {
            let mut wanted = size;
            let mut pairs = Vec::new();
            while wanted > 1 {
                // The product was checked, so pairs are left while a size is wanted.
                let Some((have, stride)) = left.pop() else { break };
                if have % wanted == 0 {
                    pairs.insert(0, (wanted, stride));
                    if have > wanted {
                        left.push((have / wanted, stride * wanted));
                    }
                    wanted = 1;
                } else if wanted % have == 0 {
                    pairs.insert(0, (have, stride));
                    wanted /= have;
                } else {
                    return Err(Error::invalid(format!(
                        "sizes ({}) do not fit a dimension whose ranks lie in steps of {have}",
                        text()
                    )));
                }
            }
            parts.push(Dim::known(&pairs));
        }
        parts.reverse();
        Ok(parts)
    }

    /// Returns the number of steps.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the pairs, coalesced, the most significant first.
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// Returns how far step `index` lies from step 0. An index past the end wraps.
    pub fn offset(&self, index: usize) -> usize {
        let (mut left, mut offset) = (index, 0);
        for &(size, stride) in self.pairs.iter().rev() {
            offset += left % size * stride;
            left /= size;
        }
        offset
    }

    /// Returns the step along this dimension at which a position lies.
    ///
    /// ```
    /// // Position 6 of (2, 4) row-major is at (1, 2).
    /// let dims = devicemesh::layout::row_major(&[2, 4]).unwrap();
    /// assert_eq!((dims[0].coordinate(6), dims[1].coordinate(6)), (1, 2));
    /// ```
    #[inline]
    pub fn coordinate(&self, position: usize) -> usize {
        self.pairs.iter().fold(0, |coordinate, &(size, stride)| coordinate * size + position / stride % size)
    }

    /// Returns the position at step 0 of the group that holds `position`. It is equal exactly for
    /// the members of one group.
    ///
    /// ```
    /// use devicemesh::layout::Dim;
    /// let dp = Dim::new(&[(2, 4)]).unwrap();
    /// assert_eq!((dp.base(2), dp.base(6)), (2, 2)); // the group {2, 6}
    /// ```
    pub fn base(&self, position: usize) -> usize {
        position - self.pairs.iter().map(|&(size, stride)| position / stride % size * stride).sum::<usize>()
    }
}

/// Returns the dimensions of a row-major array of that shape.
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
        dims.push(Dim::known(&[(size, stride)]));
        stride = stride.checked_mul(size).ok_or_else(|| {
            Error::invalid(format!(
                "the product of shape ({}) does not fit into 64 bits",
                shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
            ))
        })?;
    }
    dims.reverse();
    Ok(dims)
}
