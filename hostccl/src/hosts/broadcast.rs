//! Large broadcasts over several hosts.
//!
//! The hosts form a tree whose root is the root's host. Each rail passes its elements from host to
//! host, and the seats of a host give each other the elements of their rails.

use std::ops::Range;

use super::work::{FIRST, Work, chunks};
use crate::blocks::Block;
use crate::collective::{Call, Kind, part};
use crate::error::Result;

/// The place of a host in the tree. Hosts are counted from the root's host on.
struct Place {
    /// The host from which the data comes; `None` for the root's host.
    parent: Option<usize>,
    /// The hosts to which the data goes.
    children: Vec<usize>,
}

impl Place {
    fn new(host: usize, root: usize, hosts: usize, is_chain: bool) -> Place {
        let number = (host + hosts - root) % hosts;
        let host_of = |number: usize| (number + root) % hosts;
        let parent = match number {
            0 => None,
            _ if is_chain => Some(host_of(number - 1)),
            _ => Some(host_of(number & (number - 1))),
        };
        // In the binomial tree, each child of a number is that number with one more bit, below the
        // lowest bit of the number.
        let lowest = if number == 0 { hosts.next_power_of_two() } else { 1 << number.trailing_zeros() };
        let bits = std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|bit| *bit > 0);
        let children: Vec<usize> = match is_chain {
            true => vec![number + 1],
            false => bits.map(|bit| number + bit).collect(),
        };
        Place { parent, children: children.into_iter().filter(|child| *child < hosts).map(host_of).collect() }
    }
}

/// Gives `count` elements of `send` on the root to `recv` on all ranks.
///
/// # Safety
/// The buffers hold the elements.
pub(super) async unsafe fn broadcast(
    work: &Work<'_>,
    send: *const u8,
    recv: *mut u8,
    count: usize,
    root: usize,
) -> Result<()> {
    let (span, rails, size) = (work.span(), work.rails(), work.size());
    let (seat, seats) = (work.comm.rank, work.comm.nranks);
    let place = Place::new(span.host(), span.host_of[root], span.hosts.len(), count * size >= work.limits().chain);
    let server = |rail: usize, host: usize| span.hosts[host][rails.server(rail, span.hosts[host].len())];
    let rail = |rail: usize, length: usize| {
        let (start, count) = part(length, rail, rails.count, size);
        Block { start, count }
    };
    // The data is cut so that hosts pass on one piece, and seats share one, while the next piece is
    // on its way. With two hosts of one rank each there is nothing to pass on or to share, so the
    // data is not cut.
    let is_cut = rails.count > 1 || span.hosts.len() > 2;
    let each = if is_cut { work.limits().broadcast / size } else { count };
    let ranges = || chunks(count, each).map(|range| range.start..range.end.min(count));
    let mut sends = work.transfers();
    let mut pass_on = |range: &Range<usize>, from: *const u8| {
        for number in rails.served(seat, seats) {
            let Block { start, count } = rail(number, range.len());
            for host in &place.children {
                // SAFETY: the range lies in the buffer, which nobody changes before the end.
                unsafe {
                    let from = from.add((range.start + start) * size);
                    sends.send(server(number, *host), FIRST, from, count * size);
                }
            }
        }
    };
    let Some(parent) = place.parent else {
        let seat_of_root = rails.seat(root);
        let is_root = span.rank == root;
        for range in ranges() {
            if seats > 1 {
                let call = Call {
                    kind: Kind::Broadcast,
                    send: send.wrapping_add(if is_root { range.start * size } else { 0 }),
                    recv: recv.wrapping_add(range.start * size),
                    count: range.len(),
                    dtype: work.dtype,
                    reduction: None,
                    root: Some(seat_of_root),
                };
                // SAFETY: the range lies in the buffers.
                unsafe { work.part(call, None).await? };
                pass_on(&range, recv);
            } else {
                pass_on(&range, send);
            }
        }
        if seats == 1 && send != recv {
            // SAFETY: both buffers hold the elements.
            unsafe { std::ptr::copy(send, recv, count * size) };
        }
        return work.over(&mut sends).await;
    };
    let mut receives = Vec::new();
    for range in ranges() {
        let mut receive = work.transfers();
        for number in rails.served(seat, seats) {
            let Block { start, count } = rail(number, range.len());
            // SAFETY: the range lies in the buffer.
            unsafe {
                let to = recv.add((range.start + start) * size);
                receive.recv(server(number, parent), FIRST, to, count * size);
            }
        }
        receives.push((range, receive));
    }
    for (range, mut receive) in receives {
        work.over(&mut receive).await?;
        pass_on(&range, recv);
        if seats > 1 {
            let of = |seat: usize| {
                let (mut start, mut end) = (0, 0);
                for (index, number) in rails.served(seat, seats).enumerate() {
                    let block = rail(number, range.len());
                    start = if index == 0 { block.start } else { start };
                    end = block.start + block.count;
                }
                Block { start, count: end - start }
            };
            let blocks: Vec<Block> = (0..seats).map(of).collect();
            // SAFETY: the blocks lie in the buffer.
            unsafe {
                let base = recv.add(range.start * size);
                work.gather_here(base.add(blocks[seat].start * size), base, blocks).await?;
            }
        }
    }
    work.over(&mut sends).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_one_parent_and_is_its_child() {
        for hosts in 1..=17 {
            for root in 0..hosts {
                for is_chain in [false, true] {
                    for host in 0..hosts {
                        let place = Place::new(host, root, hosts, is_chain);
                        assert_eq!(place.parent.is_none(), host == root);
                        for child in &place.children {
                            assert_eq!(Place::new(*child, root, hosts, is_chain).parent, Some(host));
                        }
                        if let Some(parent) = place.parent {
                            assert!(Place::new(parent, root, hosts, is_chain).children.contains(&host));
                        }
                    }
                }
            }
        }
    }
}
