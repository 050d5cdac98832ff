//! Some of the indices of one dimension, as a space of positions of its own.

use super::digits::{Pair, complement};
use super::dim::Dim;
use crate::error::{Error, Result};

/// Neighbouring digits of a position, which are in the whole space and in the subrange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Digits {
    /// The number of values of these digits.
    size: usize,
    /// The stride in the whole space.
    outer: usize,
    /// The stride in the space of the subrange.
    inner: usize,
}

/// The positions of a space whose index along one dimension is `start`, `start + step` ... (`len`
/// of them). They are numbered anew from 0, and their digits keep the order.
///
/// ```
/// use devicemesh::layout::{Subrange, row_major};
/// // The mesh (dp=2, pp=4, tp=2) has positions 0..16. Its stages 1 and 3 are the mesh
/// // (dp=2, pp=2, tp=2) with positions 0..8.
/// let dims = row_major(&[2, 4, 2]).unwrap();
/// let stages = Subrange::new(16, &dims[1], 1, 2, 2).unwrap();
/// assert_eq!(stages.size(), 8);
/// assert_eq!((0..8).map(|position| stages.outer(position)).collect::<Vec<_>>(), [2, 3, 6, 7, 10, 11, 14, 15]);
/// assert_eq!((stages.inner(7), stages.inner(8)), (Some(3), None));
/// // Its dimensions: pp is (2, 2) here, and dp has stride 4 instead of 8.
/// assert_eq!(stages.dim().pairs(), [(2, 2)]);
/// assert_eq!(stages.inner_dim(&dims[0]).unwrap().pairs(), [(2, 4)]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subrange {
    /// The dimension before it is cut, in the whole space.
    whole: Dim,
    /// The first index of the range.
    start: usize,
    /// The difference between two indices of the range.
    step: usize,
    /// The number of indices of the range.
    len: usize,
    /// The stride of the index within the range, in the space of the subrange.
    stride: usize,
    /// All other digits, the least significant first.
    others: Vec<Digits>,
    /// The number of positions of the subrange.
    size: usize,
}

impl Subrange {
    /// Makes the subrange of positions `0..space`, of which `dim` is a dimension.
    ///
    /// It is refused when `len` or `step` is 0, when an index is not one of the dimension, and when
    /// the dimension is not one of the space.
    ///
    /// ```
    /// use devicemesh::layout::{Dim, Subrange};
    /// let dim = Dim::new(&[(4, 1)]).unwrap();
    /// assert!(Subrange::new(8, &dim, 2, 2, 1).is_ok());
    /// assert!(Subrange::new(8, &dim, 2, 3, 1).is_err()); // index 4 of 4
    /// assert!(Subrange::new(6, &dim, 0, 2, 1).is_err()); // 4 does not divide 6
    /// ```
    pub fn new(space: usize, dim: &Dim, start: usize, len: usize, step: usize) -> Result<Subrange> {
        if len == 0 || step == 0 {
            return Err(Error::invalid(format!(
                "a range of {len} indices in steps of {step}: both numbers must be at least 1"
            )));
        }
        let last = (len - 1).checked_mul(step).and_then(|span| span.checked_add(start));
        if last.is_none_or(|last| last >= dim.size()) {
            let last = last.map_or("more than an index can be".to_owned(), |last| last.to_string());
            return Err(Error::invalid(format!(
                "{len} indices from {start} in steps of {step} end at {last}, but the dimension has indices 0 to {}",
                dim.size() - 1
            )));
        }
        // A step that leads to no other index says nothing, and may be larger than the space.
        let step = if len == 1 { 1 } else { step };
        let mut rest = complement(&[(space, 1)], dim.pairs())?;
        rest.sort_unstable_by_key(|pair| pair.1);
        // The range takes the place of the dimension's fastest digit.
        let place = dim.pairs().iter().map(|pair| pair.1).min().unwrap_or(1);
        let (mut size, mut stride, mut others) = (1, None, Vec::with_capacity(rest.len()));
        for (digits, outer) in rest {
            if outer > place && stride.is_none() {
                stride = Some(size);
                size *= len;
            }
            others.push(Digits { size: digits, outer, inner: size });
            size *= digits;
        }
        let (stride, size) = match stride {
            Some(stride) => (stride, size),
            None => (size, size * len),
        };
        Ok(Subrange { whole: dim.clone(), start, step, len, stride, others, size })
    }

    /// Returns the number of positions.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the range as a dimension of its own space.
    pub fn dim(&self) -> Dim {
        Dim::known(&[(self.len, self.stride)])
    }

    /// Returns the place in the whole space of a position of the subrange.
    pub fn outer(&self, position: usize) -> usize {
        let index = self.start + position / self.stride % self.len * self.step;
        let others = self.others.iter().map(|digits| position / digits.inner % digits.size * digits.outer);
        others.sum::<usize>() + self.whole.offset(index)
    }

    /// Returns the place in the subrange of a position of the whole space, or `None` when the
    /// position is outside.
    pub fn inner(&self, position: usize) -> Option<usize> {
        let steps = self.whole.coordinate(position).checked_sub(self.start)?;
        let index = Some(steps / self.step).filter(|index| steps % self.step == 0 && *index < self.len)?;
        Some(self.at_start(position) + index * self.stride)
    }

    /// Returns the position at index 0 of the range that has all other digits of `position`. The
    /// position itself may lie outside.
    pub fn at_start(&self, position: usize) -> usize {
        self.others.iter().map(|digits| position / digits.outer % digits.size * digits.inner).sum()
    }

    /// Returns a dimension of the whole space as a dimension of the subrange, or `None` when it
    /// shares digits with the dimension that is cut.
    pub fn inner_dim(&self, dim: &Dim) -> Option<Dim> {
        let others: Vec<_> = self.others.iter().map(|digits| (digits.size, digits.outer, digits.inner)).collect();
        translate(dim.pairs(), &others)
    }

    /// Returns a dimension of the subrange as the dimension of the whole space that has the same
    /// groups, or `None` when the range is a part of it.
    ///
    /// ```
    /// use devicemesh::layout::{Dim, Subrange, row_major};
    /// let dims = row_major(&[2, 4, 2]).unwrap();
    /// let one = Subrange::new(16, &dims[1], 3, 1, 1).unwrap();
    /// // Without the digit between them, the outer two lie side by side.
    /// assert_eq!(one.outer_dim(&Dim::new(&[(4, 1)]).unwrap()).unwrap().pairs(), [(2, 8), (2, 1)]);
    /// let two = Subrange::new(16, &dims[1], 0, 2, 1).unwrap();
    /// assert!(two.outer_dim(&two.dim()).is_none());
    /// ```
    pub fn outer_dim(&self, dim: &Dim) -> Option<Dim> {
        let others: Vec<_> = self.others.iter().map(|digits| (digits.size, digits.inner, digits.outer)).collect();
        translate(dim.pairs(), &others)
    }

    /// Returns a dimension of the subrange by its steps in the whole space, or `None` when the
    /// steps along the range are not all equal there. Its groups start at
    /// [`outer`](Subrange::outer)`(0)`, unlike those of [`outer_dim`](Subrange::outer_dim).
    pub fn outer_steps(&self, dim: &Dim) -> Option<Dim> {
        let stride = match self.whole.pairs() {
            [] => 1,
            [(_, stride)] => *stride,
            _ => return None,
        };
        let mut all: Vec<_> = self.others.iter().map(|digits| (digits.size, digits.inner, digits.outer)).collect();
        all.push((self.len, self.stride, self.step * stride));
        translate(dim.pairs(), &all)
    }
}

/// Translates pairs over one space to a dimension over another. `digits` are (size, stride there,
/// stride here), and no other digits may be used.
fn translate(pairs: &[Pair], digits: &[(usize, usize, usize)]) -> Option<Dim> {
    let mut translated = Vec::with_capacity(pairs.len());
    for &(size, stride) in pairs {
        let (mut at, end, from) = (stride, size.checked_mul(stride)?, translated.len());
        while at < end {
            let holds = |known: &&(usize, usize, usize)| known.1 <= at && at < known.0 * known.1;
            let &(count, there, here) = digits.iter().find(holds)?;
            let next = end.min(count * there);
            if at % there != 0 || next % at != 0 || (count * there) % next != 0 {
                return None;
            }
            // A dimension has the most significant pair first.
            translated.insert(from, (next / at, at / there * here));
            at = next;
        }
    }
    Some(Dim::known(&translated))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::row_major;

    #[test]
    fn positions_go_there_and_back_for_every_range_of_every_dimension() {
        let dims = row_major(&[3, 4, 2]).unwrap();
        let joined = [
            Dim::join([&dims[0], &dims[2]]).unwrap(),
            Dim::join([&dims[2], &dims[0]]).unwrap(),
            Dim::join([&dims[1], &dims[2]]).unwrap(),
            Dim::join(&dims).unwrap(),
        ];
        for dim in dims.iter().chain(&joined) {
            for start in 0..dim.size() {
                for step in 1..dim.size() + 1 {
                    for len in 1..(dim.size() - start).div_ceil(step) + 1 {
                        let range = Subrange::new(24, dim, start, len, step).unwrap();
                        let wanted: Vec<usize> = (0..len).map(|index| start + index * step).collect();
                        let inside: Vec<usize> = (0..24).filter(|at| wanted.contains(&dim.coordinate(*at))).collect();
                        assert_eq!(range.size(), inside.len());
                        let mut outer: Vec<usize> = (0..range.size()).map(|position| range.outer(position)).collect();
                        for (position, outer) in outer.iter().enumerate() {
                            assert_eq!(range.inner(*outer), Some(position));
                            assert_eq!(wanted[range.dim().coordinate(position)], dim.coordinate(*outer));
                        }
                        outer.sort_unstable();
                        assert_eq!(outer, inside);
                        for other in dims.iter().filter(|other| range.inner_dim(other).is_some()) {
                            let here = range.inner_dim(other).unwrap();
                            assert_eq!(range.outer_dim(&here).as_ref(), Some(other));
                            for position in 0..range.size() {
                                assert_eq!(here.coordinate(position), other.coordinate(range.outer(position)));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_step_of_a_single_index_does_not_matter() {
        let dims = row_major(&[2, 4, 2]).unwrap();
        let [one, far] = [1, usize::MAX].map(|step| Subrange::new(16, &dims[1], 2, 1, step).unwrap());
        assert_eq!(one, far);
        assert_eq!(far.outer_steps(&dims[2]).unwrap(), dims[2]);
    }

    #[test]
    fn steps_in_the_whole_space_are_known_where_they_are_equal() {
        let dims = row_major(&[2, 4, 2]).unwrap();
        let range = Subrange::new(16, &dims[1], 1, 2, 2).unwrap();
        let all = range.outer_steps(&Dim::new(&[(8, 1)]).unwrap()).unwrap();
        assert_eq!(
            (0..8).map(|at| range.outer(0) + all.offset(at)).collect::<Vec<_>>(),
            (0..8).map(|at| range.outer(at)).collect::<Vec<_>>()
        );
        let gapped = Dim::join([&dims[0], &dims[2]]).unwrap();
        assert_eq!(Subrange::new(16, &gapped, 1, 2, 1).unwrap().outer_steps(&Dim::new(&[(2, 1)]).unwrap()), None);
    }
}
