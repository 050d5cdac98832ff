//! Verifies the collectives along a dimension, with data that tells from which rank and index every
//! element comes.

use std::time::Duration;

use devicemesh::comm::{Buffer, Memory, View};
use devicemesh::error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::operation::{Call, Collective};
use super::team::{Exchange, Team};
use super::values::{Expected, Kind, Member};

/// The counts that are verified: one element, odd counts, and one above 2^16. In large groups they
/// are smaller, so that all ranks together have at most [`MOST`] elements.
const COUNTS: [usize; 5] = [1, 3, 17, 1021, 65_537];
/// The maximum number of elements of all ranks of a group together.
const MOST: usize = 1 << 20;
/// The largest count at which several ranks are the root in turn.
const SMALL: usize = 17;
/// The largest group in which every rank is the root once.
const ROOTS: usize = 8;
/// The value of every byte of the receive buffer before a call.
const POISON: u8 = 0xa5;
/// The number of bytes after the result that must keep that value.
const GUARD: usize = 64;
/// The maximum number of wrong results that a rank reports for each collective.
const TOLD: usize = 2;

/// A call whose result is wrong.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Wrong {
    pub dimension: String,
    pub collective: String,
    /// The call in words.
    pub call: String,
    pub count: usize,
    /// The world rank that got the result, and its host.
    pub rank: usize,
    pub host: String,
    /// The world ranks of its group.
    pub group: Vec<i32>,
    /// The index of the first wrong element in the receive buffer. It is past the end where the
    /// call wrote there.
    pub index: usize,
    /// The element that should be there. `None` past the end.
    pub expected: Option<f64>,
    /// The element that is there. `None` past the end, and for a NaN.
    pub got: Option<f64>,
    /// The world rank from which the element comes, where it comes from one.
    pub source: Option<i32>,
    /// The number of elements that are wrong.
    pub elements: usize,
    /// The number of all elements.
    pub of: usize,
}

/// A dimension of the mesh with what calls along it need.
pub struct Bench<'a> {
    pub view: &'a View,
    /// The index of the dimension in the view.
    pub index: usize,
    pub name: &'a str,
    /// The world ranks of this rank's group by position.
    pub group: Vec<i32>,
    /// This rank's position in the group.
    pub position: usize,
    /// The type of the elements.
    pub kind: Kind,
    pub memory: &'a Memory,
    /// The buffers of all calls.
    pub send: &'a Buffer,
    pub recv: &'a Buffer,
    /// The longest time of one call.
    pub patience: Duration,
}

impl Bench<'_> {
    pub fn size(&self) -> usize {
        self.group.len()
    }

    /// Makes a call and returns when it is done. `at` are byte offsets into the two buffers.
    pub fn run(&self, call: &Call, send: &Buffer, at: (usize, usize)) -> Result<()> {
        self.issue(call, send, at)?;
        self.wait()
    }

    /// Makes a call, which on a device may still be under way when this returns. `at` are byte
    /// offsets into the two buffers.
    pub fn issue(&self, call: &Call, send: &Buffer, at: (usize, usize)) -> Result<()> {
        let (send, recv) = (send.at(at.0), self.recv.at(at.1));
        self.view.collective(self.index, call.collective(), self.kind.dtype as i32, call.count, send, recv)
    }

    /// Returns when all calls are done.
    pub fn wait(&self) -> Result<()> {
        self.memory.wait(self.patience, || self.view.check(self.index))
    }
}

/// The bytes that each buffer needs in groups of that size, where the largest measured size is
/// `measured`.
pub fn buffer_bytes(size: usize, kind: Kind, measured: usize) -> usize {
    let verified = counts(size).last().copied().unwrap_or(1) * size;
    (verified.max(size) * kind.bytes()).max(measured.next_multiple_of(8)) + GUARD
}

/// Verifies one collective. Returns the number of calls and what was wrong in them.
pub fn verify(
    bench: &Bench<'_>,
    collective: Collective,
    team: &Team,
    exchange: &Exchange<'_>,
) -> Result<(usize, Vec<Wrong>)> {
    let (mut calls, mut wrong) = (0, Vec::new());
    let operators = if collective.operators().is_empty() { &[0] } else { collective.operators() };
    for count in counts(bench.size()) {
        for (operator, root) in
            operators.iter().flat_map(|op| roots(collective, bench.size(), count).map(|root| (*op, root)))
        {
            let call = Call { collective, operator, root, in_place: false, count };
            exchange.alive()?;
            let wanted = wanted(bench, &call)?;
            let ways: &[bool] = if collective.can_be_in_place() { &[false, true] } else { &[false] };
            for in_place in ways {
                let call = Call { in_place: *in_place, ..call };
                calls += 1;
                let found = verify_call(bench, &call, &wanted)?;
                if let Some(found) = found.filter(|_| wrong.len() < TOLD) {
                    wrong.push(Wrong {
                        dimension: bench.name.to_owned(),
                        collective: collective.name().to_owned(),
                        call: call.label(),
                        count,
                        rank: team.rank(),
                        host: team.host().to_owned(),
                        group: bench.group.clone(),
                        index: found.index,
                        expected: found.expected,
                        got: found.got,
                        source: source(&call, bench, found.index),
                        elements: found.elements,
                        of: wanted.len(),
                    });
                }
            }
        }
    }
    Ok((calls, wrong))
}

/// The counts in groups of that size.
fn counts(size: usize) -> Vec<usize> {
    let most = (MOST / size).max(1);
    let mut counts: Vec<usize> = COUNTS.iter().map(|count| *count.min(&most)).collect();
    counts.dedup();
    counts
}

/// The positions that are the root in turn. One position where the collective has no root.
fn roots(collective: Collective, size: usize, count: usize) -> std::vec::IntoIter<usize> {
    let roots = match (collective.has_root(), count <= SMALL) {
        (false, _) => vec![0],
        (true, true) if size <= ROOTS => (0..size).collect(),
        (true, true) => vec![0, size / 2, size - 1],
        (true, false) => vec![size - 1],
    };
    roots.into_iter()
}

/// Element `index` of the data that the rank at `position` sends.
fn sent(bench: &Bench<'_>, call: &Call, position: usize, index: usize) -> i64 {
    let member = Member { position, of: bench.size() };
    let reduces = !call.collective.operators().is_empty();
    match call.operator {
        0 | 4 if reduces => bench.kind.summand(member, index),
        1 if reduces => bench.kind.factor(member, index),
        _ => bench.kind.moved(bench.group[position] as usize, index),
    }
}

/// An empty list with room for that many values. Fails where this process gets no memory for it.
fn room<T>(values: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(values).map_err(|_| Error::no_memory(values.saturating_mul(size_of::<T>())))?;
    Ok(list)
}

/// A list of that many bytes, which all have that value.
fn bytes(count: usize, value: u8) -> Result<Vec<u8>> {
    let mut list = room(count)?;
    list.resize(count, value);
    Ok(list)
}

/// The elements that this rank must receive. There is none where it receives nothing.
fn wanted(bench: &Bench<'_>, call: &Call) -> Result<Vec<Expected>> {
    let (size, me, count, kind) = (bench.size(), bench.position, call.count, bench.kind);
    let reduced = |index: usize| {
        let values = (0..size).map(|position| sent(bench, call, position, index));
        match call.operator {
            0 => kind.exactly(values.sum()),
            1 => kind.exactly(values.product()),
            2 => kind.exactly(values.max().unwrap_or_default()),
            3 => kind.exactly(values.min().unwrap_or_default()),
            _ => kind.average(values.sum(), size),
        }
    };
    let moved = |position: usize, index: usize| kind.exactly(sent(bench, call, position, index));
    let element = |index: usize| match call.collective {
        Collective::AllReduce | Collective::Reduce => reduced(index),
        Collective::ReduceScatter => reduced(me * count + index),
        Collective::Broadcast => moved(call.root, index),
        Collective::AllGather => moved(index / count, index % count),
        Collective::AllToAll => moved(index / count, me * count + index % count),
        Collective::SendRecv => moved((me + size - 1) % size, index),
    };
    let elements = match call.collective {
        Collective::Reduce if me != call.root => 0,
        collective => collective.blocks(size).1 * count,
    };
    let mut list = room(elements)?;
    list.extend((0..elements).map(element));
    Ok(list)
}

/// The world rank from which an element of the result comes. `None` where it comes from all.
fn source(call: &Call, bench: &Bench<'_>, index: usize) -> Option<i32> {
    let size = bench.size();
    let position = match call.collective {
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => return None,
        Collective::Broadcast => call.root,
        Collective::AllGather | Collective::AllToAll => index / call.count,
        Collective::SendRecv => (bench.position + size - 1) % size,
    };
    bench.group.get(position).copied()
}

/// A wrong result. The fields of [`Wrong`] with these names say what each one holds.
#[derive(Debug, PartialEq)]
struct Found {
    index: usize,
    expected: Option<f64>,
    got: Option<f64>,
    elements: usize,
}

/// Makes a call and compares its result.
fn verify_call(bench: &Bench<'_>, call: &Call, wanted: &[Expected]) -> Result<Option<Found>> {
    let (kind, me) = (bench.kind, bench.position);
    let (blocks, back) = call.collective.blocks(bench.size());
    let (block, sends) = (call.count * kind.bytes(), call.collective != Collective::Broadcast || me == call.root);
    let elements = if sends { blocks * call.count } else { 0 };
    let mut data: Vec<u8> = room(elements * kind.bytes())?;
    data.extend(
        (0..elements).flat_map(|index| kind.encode(sent(bench, call, me, index)).into_iter().take(kind.bytes())),
    );
    // In place, the smaller buffer is this rank's block of the larger one.
    let (sends_at, receives_at) = match (call.in_place, call.collective) {
        (true, Collective::AllGather) => (me * block, 0),
        (true, Collective::ReduceScatter) => (0, me * block),
        _ => (0, 0),
    };
    let send = if call.in_place { bench.recv } else { bench.send };
    bench.recv.write(0, &bytes(block * blocks.max(back) + GUARD, POISON)?)?;
    send.write(sends_at, &data)?;
    bench.run(call, send, (sends_at, receives_at))?;
    if wanted.is_empty() {
        return Ok(None);
    }
    let mut got = bytes(wanted.len() * kind.bytes() + GUARD, 0)?;
    bench.recv.read(receives_at, &mut got)?;
    // In place, this rank's block is followed by the rest of what it sent.
    let guarded = !(call.in_place && call.collective == Collective::ReduceScatter);
    Ok(compare(kind, &got, wanted, guarded))
}

/// Compares a result. `got` holds the elements and the guard behind them, which must be untouched
/// where `guarded`.
fn compare(kind: Kind, got: &[u8], wanted: &[Expected], guarded: bool) -> Option<Found> {
    let (elements, guard) = got.split_at(wanted.len() * kind.bytes());
    let fits = |(element, expected): (&[u8], &Expected)| kind.fits(element, expected);
    let mut wrong = elements.chunks_exact(kind.bytes()).zip(wanted).enumerate().filter(|(_, pair)| !fits(*pair));
    if let Some((index, (element, expected))) = wrong.next() {
        let elements = 1 + wrong.count();
        return Some(Found { index, expected: Some(expected.value), got: Some(kind.decode(element)), elements });
    }
    let past = guard.iter().position(|byte| *byte != POISON).filter(|_| guarded)?;
    Some(Found { index: wanted.len() + past / kind.bytes(), expected: None, got: None, elements: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(change: impl Fn(&mut [u8])) -> Option<Found> {
        let kind = Kind::named("float32").unwrap();
        let wanted: Vec<Expected> = (0..5).map(|index| kind.exactly(index)).collect();
        let mut got: Vec<u8> = (0..5).flat_map(|index| kind.encode(index).into_iter().take(4)).collect();
        got.extend([POISON; GUARD]);
        change(&mut got);
        compare(kind, &got, &wanted, true)
    }

    #[test]
    fn the_first_wrong_element_is_found_with_its_values() {
        assert_eq!(found(|_| ()), None);
        let one = found(|got| got[12..16].copy_from_slice(&9.0f32.to_le_bytes()));
        assert_eq!(one, Some(Found { index: 3, expected: Some(3.0), got: Some(9.0), elements: 1 }));
        let two = found(|got| got[4..12].fill(POISON)).unwrap();
        assert_eq!((two.index, two.elements), (1, 2));
    }

    #[test]
    fn what_is_written_past_the_end_is_found() {
        assert_eq!(found(|got| got[24] = 0), Some(Found { index: 6, expected: None, got: None, elements: 0 }));
    }

    #[test]
    fn large_groups_take_fewer_elements() {
        assert_eq!(counts(8), COUNTS);
        assert_eq!(counts(1024), [1, 3, 17, 1021, 1024]);
        assert_eq!(counts(1 << 21), [1]);
    }
}
