//! A view as text, its comparison by value, and its hash.

use std::fmt;

use super::make::Mesh;
use super::root::{NamedDim, RankMap};
use crate::digest::Fnv1a;
use crate::layout::{Dim, Pair};
use crate::printable::printable;

impl Mesh {
    /// Returns the text that PyTorch prints for the mesh.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let names = ["dp", "cp", "tp"];
    /// let spec = MeshSpec::new("cuda", &[2, 2, 2], 8, 0).names(&names);
    /// let mesh = Mesh::new(&spec).unwrap();
    /// assert_eq!(mesh.describe(), "DeviceMesh((dp=2, cp=2, tp=2), 'cuda', stride=(4, 2, 1))");
    /// let flat = mesh.slice(&["dp", "tp"]).unwrap().flatten(None).unwrap();
    /// assert_eq!(flat.describe(), "DeviceMesh((dp_tp=4), 'cuda', stride=((4, 1),))");
    /// // Names that nobody gave (dim_0, dim_1 ...) are not printed.
    /// let unnamed = Mesh::new(&MeshSpec::new("cuda", &[2, 2, 2], 8, 0)).unwrap();
    /// assert_eq!(unnamed.describe(), "DeviceMesh((2, 2, 2), 'cuda', stride=(4, 2, 1))");
    /// ```
    pub fn describe(&self) -> String {
        self.to_string()
    }

    /// Whether two views have the same ranks, shape, names and device type, by value.
    pub fn equals(&self, other: &Mesh) -> bool {
        let mut pairs = self.dims.iter().zip(other.dims.iter());
        let same_form = self.device_type() == other.device_type()
            && self.dims.len() == other.dims.len()
            && pairs.clone().all(|(ours, theirs)| ours.name == theirs.name && ours.dim.size() == theirs.dim.size());
        if !same_form {
            return false;
        }
        let simple = matches!((&self.root.ranks, &other.root.ranks), (RankMap::Identity, RankMap::Identity));
        if simple || self.same_root(other) {
            // Coalesced pairs are equal exactly when the ranks that they visit are.
            return self.base == other.base && pairs.all(|(ours, theirs)| ours.dim == theirs.dim);
        }
        match (self.walk(), other.walk()) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => self.each_rank().eq(other.each_rank()),
        }
    }

    /// Computes a hash of what [`equals`](Mesh::equals) compares, the same on every rank, run and
    /// machine.
    ///
    /// The hash is FNV-1a (64 bits) over the device type, then for each dimension its size and
    /// name, and then the number `R = sum of rank[i] * Q^i` modulo 2^64 over the row-major ranks,
    /// with `Q = 0x9e3779b97f4a7c15`. For ranks that lie in strides `R` has a closed form, so the
    /// hash of a mesh without an explicit rank array takes no longer for a million ranks than for
    /// eight.
    pub fn hash(&self) -> u64 {
        let mut digest = Fnv1a::default().text(self.device_type());
        for named in self.dims.iter() {
            digest = digest.number(named.dim.size() as u64).text(&named.name);
        }
        let ranks = match self.walk() {
            Some((first, dim)) => strided_sum(first, dim.pairs()),
            None => {
                let add = |(sum, power): (u64, u64), rank: i32| {
                    (sum.wrapping_add(power.wrapping_mul(rank as u64)), power.wrapping_mul(Q))
                };
                self.each_rank().fold((0, 1), add).0
            }
        };
        digest.number(ranks).value()
    }

    /// Returns the first rank and the steps to the others, row-major, or `None` when the ranks
    /// follow no strides.
    fn walk(&self) -> Option<(usize, Dim)> {
        let (mut root, mut first, mut dim) = (&self.root, self.base, self.joined());
        loop {
            match &root.ranks {
                RankMap::Identity => return Some((first, dim)),
                RankMap::Listed(_) => return None,
                RankMap::Within(outer, range) => {
                    (root, first, dim) = (outer, range.outer(first), range.outer_steps(&dim)?);
                }
            }
        }
    }
}

/// Computes `R` of [`hash`](Mesh::hash) from strides. Each pair walks k = 0 .. size with offset k *
/// stride and adds k * step to the row-major index. So the sum over all indices is a product of
/// geometric sums, in which one factor in turn is weighted by k.
fn strided_sum(first: usize, pairs: &[Pair]) -> u64 {
    let mut sums = Vec::new();
    let mut power = Q;
    for &(size, stride) in pairs.iter().rev() {
        let (plain, weighted, next) = geometric(power, size as u64);
        sums.push((plain, weighted.wrapping_mul(stride as u64)));
        power = next;
    }
    let all = sums.iter().fold(1u64, |product, (plain, _)| product.wrapping_mul(*plain));
    let mut total = all.wrapping_mul(first as u64);
    for index in 0..sums.len() {
        let others = sums.iter().enumerate().filter(|(other, _)| *other != index);
        total = total.wrapping_add(others.fold(sums[index].1, |product, (_, sum)| product.wrapping_mul(sum.0)));
    }
    total
}

/// The base of the rank polynomial. It is odd, so no power of it loses bits.
const Q: u64 = 0x9e37_79b9_7f4a_7c15;

/// Computes the sum of q^k and the sum of k q^k over k = 0 .. n, and q^n, all modulo 2^64. They are
/// found by doubling.
fn geometric(q: u64, n: u64) -> (u64, u64, u64) {
    let (mut plain, mut weighted, mut power, mut count) = (0u64, 0u64, 1u64, 0u64);
    for bit in (0..u64::BITS - n.leading_zeros()).rev() {
        // The second half is the first half times q^count, and its weights are larger by count.
        weighted = weighted
            .wrapping_add(power.wrapping_mul(weighted))
            .wrapping_add(power.wrapping_mul(count).wrapping_mul(plain));
        plain = plain.wrapping_add(power.wrapping_mul(plain));
        power = power.wrapping_mul(power);
        count *= 2;
        if n >> bit & 1 == 1 {
            plain = plain.wrapping_add(power);
            weighted = weighted.wrapping_add(count.wrapping_mul(power));
            power = power.wrapping_mul(q);
            count += 1;
        }
    }
    (plain, weighted, power)
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sized = |dim: &NamedDim| match dim.named {
            true => format!("{}={}", printable(&dim.name), dim.dim.size()),
            false => dim.dim.size().to_string(),
        };
        let dims: Vec<String> = self.dims.iter().map(sized).collect();
        let strides: Vec<String> = self.dims.iter().map(|named| stride_text(named.dim.pairs())).collect();
        let comma = if strides.len() == 1 { "," } else { "" };
        // Python writes a tuple of one number with a comma. A dimension with a name is no number.
        let lone = if self.dims.len() == 1 && !self.dims[0].named { "," } else { "" };
        write!(
            f,
            "DeviceMesh(({}{lone}), '{}', stride=({}{comma}))",
            dims.join(", "),
            printable(self.device_type()),
            strides.join(", ")
        )
    }
}

/// Writes the strides of one dimension: one pair is its stride, several pairs are a tuple, and no
/// pair (size 1) is the empty tuple.
fn stride_text(pairs: &[Pair]) -> String {
    match pairs {
        [(_, stride)] => stride.to_string(),
        pairs => format!("({})", pairs.iter().map(|(_, stride)| stride.to_string()).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_sums_equal_the_plain_ones() {
        for n in [0u64, 1, 2, 3, 7, 8, 100, 1023] {
            let (mut plain, mut weighted, mut power) = (0u64, 0u64, 1u64);
            for k in 0..n {
                plain = plain.wrapping_add(power);
                weighted = weighted.wrapping_add(power.wrapping_mul(k));
                power = power.wrapping_mul(Q);
            }
            assert_eq!(geometric(Q, n), (plain, weighted, power), "n = {n}");
        }
    }
}
