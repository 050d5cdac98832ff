//! The blocks of a buffer in a call where each rank has a count of its own.

/// The part of a buffer that belongs to one rank, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Where the block begins.
    pub start: usize,
    /// How many elements it has.
    pub count: usize,
}

/// Returns the blocks of a buffer, one for each count. Without `starts` each block begins where the
/// block before it ends. Fails when the end of a block in bytes does not fit an `isize`, because no
/// memory is that large. The error calls the counts `name`.
pub fn blocks(name: &str, counts: &[usize], starts: Option<&[usize]>, element: usize) -> Result<Vec<Block>, String> {
    let mut next = 0_usize;
    let mut blocks = Vec::with_capacity(counts.len());
    for (rank, &count) in counts.iter().enumerate() {
        // An empty block lies nowhere, so its start may be any number.
        let start = starts.map_or(next, |starts| if count == 0 { 0 } else { starts[rank] });
        let end = start.checked_add(count);
        match end.and_then(|end| end.checked_mul(element)) {
            Some(bytes) if isize::try_from(bytes).is_ok() => {}
            _ => {
                return Err(format!(
                    "{name}[{rank}] is {count}: {count} elements of {element} bytes from element {start} on are more than memory can hold"
                ));
            }
        }
        next = start + count;
        blocks.push(Block { start, count });
    }
    Ok(blocks)
}

/// A buffer and the blocks that a call uses in it.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// The address of the buffer.
    pub at: usize,
    /// The blocks in it.
    pub blocks: &'a [Block],
}

impl Blocks<'_> {
    /// Returns the first byte of a block and the byte after it.
    fn range(&self, index: usize, element: usize) -> Option<(usize, usize)> {
        let Block { start, count } = *self.blocks.get(index)?;
        let first = self.at.saturating_add(start * element);
        (count > 0).then(|| (first, first.saturating_add(count * element)))
    }
}

/// Fails when a call would write to memory that it also reads, or twice to the same memory. The one
/// exception is a call in place, in which the block `in_place.0` of `send` is the block
/// `in_place.1` of `recv`.
pub fn check_apart(
    send: Blocks<'_>,
    recv: Blocks<'_>,
    element: usize,
    in_place: Option<(usize, usize)>,
) -> Result<(), String> {
    let same = in_place.filter(|(sent, received)| {
        send.range(*sent, element).is_some() && send.range(*sent, element) == recv.range(*received, element)
    });
    let mut ranges = Vec::with_capacity(send.blocks.len() + recv.blocks.len());
    for (what, blocks) in [("send", send), ("recv", recv)] {
        for index in 0..blocks.blocks.len() {
            let is_shared = what == "send" && same.is_some_and(|(sent, _)| sent == index);
            if let Some((first, end)) = blocks.range(index, element).filter(|_| !is_shared) {
                ranges.push((first, end, what, index));
            }
        }
    }
    ranges.sort_unstable();
    // For each buffer: the block that ends last among those that begin before the present one.
    let mut last: [Option<(usize, usize, &str, usize)>; 2] = [None; 2];
    for range in ranges {
        let (first, end, what, index) = range;
        let is_written = what == "recv";
        let before =
            last.iter().flatten().find(|(_, until, other, _)| first < *until && (is_written || *other == "recv"));
        if let Some((other_first, other_end, other, other_index)) = before {
            return Err(format!(
                "block {other_index} of {other} [{other_first:#x}, {other_end:#x}) and block {index} of {what} [{first:#x}, {end:#x}) overlap{}",
                match in_place {
                    Some(_) =>
                        ", but not at the exact addresses of an in-place call: pass blocks that do not overlap, or the in-place addresses",
                    None => ": pass blocks that do not overlap",
                }
            ));
        }
        let last = &mut last[usize::from(is_written)];
        if last.is_none_or(|(_, until, ..)| until < end) {
            *last = Some(range);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(pairs: &[(usize, usize)]) -> Vec<Block> {
        pairs.iter().map(|&(start, count)| Block { start, count }).collect()
    }

    #[test]
    fn blocks_follow_each_other_unless_told_otherwise() {
        assert_eq!(blocks("counts", &[2, 0, 3], None, 4).unwrap(), list(&[(0, 2), (2, 0), (2, 3)]));
        assert_eq!(blocks("counts", &[2, 3], Some(&[5, 0]), 4).unwrap(), list(&[(5, 2), (0, 3)]));
        assert!(blocks("counts", &[1, usize::MAX], None, 1).unwrap_err().contains("counts[1]"));
        assert!(blocks("counts", &[usize::MAX / 4], None, 8).is_err());
        assert!(blocks("counts", &[1], Some(&[usize::MAX]), 1).is_err());
        assert_eq!(blocks("counts", &[0], Some(&[usize::MAX]), 8).unwrap(), list(&[(0, 0)]));
    }

    #[test]
    fn what_is_written_overlaps_nothing() {
        let check = |send: &[(usize, usize)], at: usize, recv: &[(usize, usize)], in_place| {
            let (send, recv) = (list(send), list(recv));
            check_apart(Blocks { at: 1000, blocks: &send }, Blocks { at, blocks: &recv }, 4, in_place)
        };
        // Blocks to send may overlap each other, and blocks that interleave are apart.
        assert!(check(&[(0, 4), (2, 4)], 2000, &[(0, 4), (4, 1)], None).is_ok());
        assert!(check(&[(0, 2), (4, 2)], 1000, &[(2, 2), (6, 2)], None).is_ok());
        assert!(check(&[(0, 9)], 1000, &[(4, 0)], None).is_ok());
        // Memory is written twice, or read and written.
        assert!(check(&[], 2000, &[(0, 4), (3, 1)], None).unwrap_err().contains("block 1 of recv"));
        assert!(check(&[(0, 9), (1, 1)], 1000, &[(8, 1)], None).unwrap_err().contains("block 0 of send"));
        assert!(check(&[(0, 2)], 1000, &[(0, 2)], None).is_err());
        // In place, one block is both.
        assert!(check(&[(5, 2)], 1000, &[(0, 5), (5, 2), (7, 1)], Some((0, 1))).is_ok());
        assert!(
            check(&[(5, 2)], 1000, &[(0, 6), (6, 2)], Some((0, 1)))
                .unwrap_err()
                .contains("not at the exact addresses of an in-place call")
        );
        assert!(check(&[(0, 5), (5, 2)], 1000, &[(5, 2)], Some((1, 0))).is_ok());
        assert!(check(&[(4, 2), (5, 2)], 1000, &[(5, 2)], Some((1, 0))).is_err());
    }
}
