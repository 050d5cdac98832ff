//! Compares the times of a check with those of an earlier one.
//!
//! Other work on a machine makes most batches longer, so the quickest batches tell most about the
//! mesh. The time of a row is its third quickest batch, which is a time that the row reached
//! several times and not by luck. A row is slower when each of its batches takes more than the
//! tolerance longer than that time of the record, and the difference is above a floor. Rows that
//! look slower are measured [`again`](super::again), and compared with all their batches. So a
//! busy machine has many moments in which one quick batch clears the row, and a row that is really
//! slower has no such batch. A row is faster by the same rule the other way round.

use std::path::Path;

use devicemesh::error;
use devicemesh::mesh::Mesh;
use devicemesh::printable::printable;

use super::operation::Collective;
use super::options;
use super::record::{self, Record};
use super::record_options::RecordOptions;
use super::report::{Change, Comparison, Dimension, Pairs, Ratio, Report, Uncounted};
use super::slow::Rule;
use super::team::Team;
use super::words::{bytes, listed};
use crate::words::count;

/// The number of quick batches of a row. The slowest of them is the time of the row.
const QUICK: usize = 3;
/// A difference per call, in seconds, that is never a change. The quickest batches of small calls
/// differ by this much between two checks, because the kernel places the ranks differently.
const FLOOR: f64 = 8e-6;
/// The least tolerance on a busy machine. Its other work also takes caches and memory bandwidth
/// from the ranks, so even the quickest batches differ between two checks.
const BUSY_TOLERANCE: f64 = 0.5;
/// A machine is busy if the median batch of a row takes this many times as long as its quick
/// batches.
const BUSY: f64 = 1.5;

/// The times of one row, under a name that says what was measured.
struct Row {
    name: String,
    /// The seconds per call of each batch, in ascending order.
    batches: Vec<f64>,
    /// The calls of a batch.
    iterations: u32,
}

impl Row {
    fn new(name: String, seconds: f64, iterations: u32, batches: &[f64]) -> Row {
        let mut batches = if batches.is_empty() { vec![seconds] } else { batches.to_vec() };
        batches.sort_by(f64::total_cmp);
        Row { name, batches, iterations }
    }

    /// The time of the row without other work on the machine: its third quickest batch.
    fn quick(&self) -> f64 {
        self.batches[(QUICK - 1).min(self.batches.len() - 1)]
    }

    /// Whether other work kept the machine busy.
    fn is_busy(&self) -> bool {
        self.batches[self.batches.len() / 2] > BUSY * self.quick()
    }

    /// Whether each batch of this row takes more than the tolerance longer than the other row.
    /// `ranks_per_core` is how many ranks shared a core.
    fn is_slower(&self, other: &Row, tolerance: f64, ranks_per_core: f64) -> bool {
        let rule = self.rule(other, tolerance, ranks_per_core);
        let (quickest, quick) = (self.batches[0], other.quick());
        quickest > rule.factor * quick && quickest - quick > rule.floor
    }

    /// Returns by how much the times of the two rows must differ at least, so that one row is
    /// slower.
    fn rule(&self, other: &Row, tolerance: f64, ranks_per_core: f64) -> Rule {
        let share_cores = ranks_per_core > 1.0;
        let is_busy = share_cores || self.is_busy() || other.is_busy();
        let tolerance = if is_busy { tolerance.max(BUSY_TOLERANCE) } else { tolerance };
        let rule = Rule::new(1.0 + tolerance, ranks_per_core, self.iterations.min(other.iterations));
        Rule { floor: if share_cores { rule.floor } else { FLOOR }, ..rule }
    }

    /// Returns why neither row is slower although their ratio is outside the tolerance. `None`
    /// where the ratio is within the tolerance. The caller has found that neither row is slower.
    fn uncounted(&self, other: &Row, tolerance: f64, ranks_per_core: f64) -> Option<Uncounted> {
        let rule = self.rule(other, tolerance, ranks_per_core);
        let (longer, shorter) = (self.quick().max(other.quick()), self.quick().min(other.quick()));
        match longer - shorter {
            _ if longer <= (1.0 + tolerance) * shorter => None,
            small if small <= rule.floor && ranks_per_core > 1.0 => Some(Uncounted::SharedCores),
            small if small <= rule.floor => Some(Uncounted::Microseconds),
            _ if longer <= rule.factor * shorter => Some(Uncounted::Busy),
            _ => Some(Uncounted::QuickBatch),
        }
    }
}

/// Returns the words of the line below the table for `rows` rows that are no change for this
/// reason.
pub fn uncounted_text(why: Uncounted, rows: usize) -> String {
    let differ = if rows == 1 { "differs" } else { "differ" };
    let rows = count(rows, "row");
    match why {
        Uncounted::Microseconds => format!("{rows} {differ} by less than {:.0} us per call", FLOOR * 1e6),
        Uncounted::SharedCores => {
            format!("{rows} {differ} by less than the time that ranks wait for a shared core")
        }
        Uncounted::Busy => {
            format!("{rows} {differ} by less than {:.0}%, and the machine was busy", BUSY_TOLERANCE * 100.0)
        }
        Uncounted::QuickBatch => format!("{rows} had a batch as quick as in the other check"),
    }
}

/// The name of a row of the table.
pub fn row_name(dimension: &str, size: usize, groups: usize, collective: &str, size_bytes: usize) -> String {
    format!("{dimension} ({groups} x {size} ranks) {collective} of {}", bytes(size_bytes))
}

/// The name of a row of the pairs.
pub fn pairs_name(kind: &str, size_bytes: usize) -> String {
    format!("pairs {kind}, {}", bytes(size_bytes))
}

fn rows_now(dimensions: &[Dimension], pairs: &[Pairs]) -> Vec<Row> {
    let mut rows = Vec::new();
    for Dimension { name, size, groups, measurements, .. } in dimensions {
        let name = |collective, bytes| row_name(name, *size, *groups, collective, bytes);
        let measurements = measurements.iter();
        rows.extend(
            measurements
                .map(|row| Row::new(name(row.collective, row.bytes), row.seconds, row.iterations, &row.batch_seconds)),
        );
    }
    rows.extend(
        pairs
            .iter()
            .map(|row| Row::new(pairs_name(row.kind, row.bytes), row.seconds, row.iterations, &row.batch_seconds)),
    );
    rows
}

fn rows_then(record: &Record) -> Vec<Row> {
    let mut rows = Vec::new();
    for record::Dimension { name, size, groups, measurements } in &record.dimensions {
        let name = |collective, bytes| row_name(name, *size, *groups, collective, bytes);
        let measurements = measurements.iter();
        rows.extend(
            measurements
                .map(|row| Row::new(name(&row.collective, row.bytes), row.seconds, row.iterations, &row.batch_seconds)),
        );
    }
    let pairs = record.pairs.iter();
    rows.extend(
        pairs.map(|row| Row::new(pairs_name(&row.kind, row.bytes), row.seconds, row.iterations, &row.batch_seconds)),
    );
    rows
}

/// A dimension that will be measured.
struct Planned<'a> {
    name: &'a str,
    size: usize,
    groups: usize,
}

/// Fails where the record has no row of the check that is planned, and says why. `file` is the
/// record's file.
fn check_fits(
    record: &Record,
    file: &Path,
    device_type: &str,
    options: &options::Options,
    mesh: &str,
    planned: &[Planned<'_>],
) -> Result<(), String> {
    let unfit = |why: String| Err(format!("--compare {}: nothing in it can be compared: {why}", file.display()));
    if record.device_type != device_type {
        return unfit(format!("it is about device type {}, and this check about {device_type}", record.device_type));
    }
    if record.dtype != options.dtype.name() {
        return unfit(format!("its elements are {}, and this check's {}", record.dtype, options.dtype.name()));
    }
    let then = rows_then(record);
    let element = options.dtype.bytes();
    let fits = |dimension: &Planned<'_>, collective: &Collective, size: usize| {
        let (send, recv) = collective.blocks(dimension.size);
        let whole = collective.count(size, element, dimension.size) * send.max(recv) * element;
        let name = row_name(dimension.name, dimension.size, dimension.groups, collective.name(), whole);
        then.iter().any(|row| row.name == name)
    };
    let sizes = options.sizes(device_type);
    let collectives = options.collectives();
    let any = planned.iter().any(|dimension| {
        collectives.iter().any(|collective| sizes.iter().any(|size| fits(dimension, collective, *size)))
    });
    match any {
        true => Ok(()),
        false => unfit(format!(
            "it is about {}, and this check about {mesh}; it has other dimensions, collectives or sizes",
            record.mesh
        )),
    }
}

/// Looks at the files of `--save` and `--compare` before anything is measured. Rank 0 alone looks,
/// because other hosts need not have them. If a file cannot be used, every rank gets the message.
/// The record is on rank 0. **Collective over the world.**
pub fn records(options: &options::Options, team: &Team, mesh: &Mesh) -> error::Result<Result<Option<Record>, String>> {
    let RecordOptions { save, compare, .. } = &options.record;
    if save.is_none() && compare.is_none() {
        return Ok(Ok(None));
    }
    let mut planned = Vec::new();
    for (index, size) in mesh.shape().into_iter().enumerate() {
        planned.push(Planned { name: mesh.dim_name(index), size, groups: mesh.size() / size });
    }
    for flat in &options.flatten {
        let size = mesh.slice(&flat.dims())?.size();
        planned.push(Planned { name: &flat.name, size, groups: mesh.size() / size });
    }
    planned.retain(|dimension| dimension.size > 1);
    let look = || {
        save.as_deref().map_or(Ok(()), record::check_place)?;
        let Some(file) = compare else { return Ok(None) };
        let record = record::read(file)?;
        check_fits(&record, file, team.world().device_type(), options, &mesh.describe(), &planned)?;
        Ok(Some(record))
    };
    let looked: Result<Option<Record>, String> = if team.rank() == 0 { look() } else { Ok(None) };
    let wrong = looked.as_ref().err().cloned().unwrap_or_default();
    let mine = (team.rank() == 0).then(|| wrong.into_bytes());
    let told = team.step("reading the record", |exchange| exchange.share("record", mine))?;
    match String::from_utf8_lossy(&told).into_owned() {
        wrong if wrong.is_empty() => Ok(looked),
        wrong => Ok(Err(wrong)),
    }
}

/// Compares a report with a record.
pub fn compare(report: &Report, record: &Record, file: &str, tolerance: f64) -> Comparison {
    let (now, then) = (rows_now(&report.dimensions, &report.pairs), rows_then(record));
    let ranks_per_core = report.ranks_per_core.max(record.ranks_per_core);
    let (mut slower, mut faster, mut only_now, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for row in &now {
        let Some(earlier) = then.iter().find(|earlier| earlier.name == row.name) else {
            only_now.push(row.name.clone());
            continue;
        };
        let (seconds, then_seconds) = (row.quick(), earlier.quick());
        let times = seconds / then_seconds;
        let change = || Change { row: row.name.clone(), seconds, then_seconds, times };
        let mut uncounted = None;
        if row.is_slower(earlier, tolerance, ranks_per_core) {
            slower.push(change());
        } else if earlier.is_slower(row, tolerance, ranks_per_core) {
            faster.push(change());
        } else {
            uncounted = row.uncounted(earlier, tolerance, ranks_per_core);
        }
        ratios.push(Ratio { row: row.name.clone(), times, uncounted });
    }
    slower.sort_by(|a, b| b.times.total_cmp(&a.times));
    faster.sort_by(|a, b| a.times.total_cmp(&b.times));
    let is_gone = |row: &&Row| now.iter().all(|other| other.name != row.name);
    let only_then = then.iter().filter(is_gone).map(|row| printable(&row.name).into_owned()).collect();
    // The record comes from a file, which may hold anything.
    let shown = |text: &String| printable(text).into_owned();
    let differences = differences(report, record).iter().map(shown).collect();
    let date = record.date.as_ref().map(shown);
    let file = printable(file).into_owned();
    Comparison {
        file,
        date,
        tolerance,
        differences,
        compared: ratios.len(),
        measured_again: 0,
        slower,
        faster,
        only_now,
        only_then,
        ratios,
    }
}

/// Names what differs between the two checks.
fn differences(report: &Report, record: &Record) -> Vec<String> {
    let mut found = Vec::new();
    let mut differs = |what: &str, now: &str, then: &str| {
        if now != then {
            found.push(format!("{what} {now}, then {then}"));
        }
    };
    differs("mesh", &report.mesh, &record.mesh);
    differs("library", &report.library, &record.library);
    differs("NCCL", &report.library_version, &record.library_version);
    differs("devicemesh", report.version, &record.version);
    let now: Vec<&str> = report.hosts.iter().map(|host| host.name.as_str()).collect();
    let then: Vec<&str> = record.hosts.iter().map(|host| host.name.as_str()).collect();
    let without = |all: &[&str], others: &[&str]| {
        let left: Vec<&str> = all.iter().copied().filter(|host| !others.contains(host)).collect();
        listed(&left)
    };
    for (what, hosts) in [("new", without(&now, &then)), ("gone", without(&then, &now))] {
        if !hosts.is_empty() {
            found.push(format!("hosts that are {what}: {hosts}"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Row, Uncounted, uncounted_text};

    fn row(batches: &[f64]) -> Row {
        Row::new("row".to_owned(), batches[batches.len() / 2], 20, batches)
    }

    #[test]
    fn one_quick_batch_clears_a_row() {
        let then = row(&[1.0, 1.05, 1.1, 1.2, 1.2, 1.2]);
        assert!(row(&[1.3, 1.4, 1.5]).is_slower(&then, 0.1, 0.5));
        assert!(!row(&[1.3, 1.15, 1.4, 1.4]).is_slower(&then, 0.1, 0.5), "one batch was as quick");
        assert!(!row(&[1.3, 1.4, 1.5]).is_slower(&then, 0.3, 0.5), "it is within the tolerance");
        let lucky = row(&[0.5, 1.0, 1.0, 1.0]);
        assert!(!row(&[1.05; 30]).is_slower(&lucky, 0.1, 0.5), "the quickest batch of the record was luck");
        let old = Row::new(String::new(), 1.0, 20, &[]);
        assert!(row(&[1.3]).is_slower(&old, 0.1, 0.5), "a record without batches has its median");
    }

    #[test]
    fn a_busy_machine_does_not_hide_twice_the_time() {
        let then = row(&[1.0, 1.05, 1.1, 9.0, 9.0, 9.0, 9.0]);
        let now = row(&[2.0, 2.1, 9.0, 9.0, 9.0, 9.0, 9.0]);
        assert!(now.is_slower(&then, 0.1, 0.5));
        assert!(!row(&[1.5; 7]).is_slower(&then, 0.1, 0.5), "half as much more may come from the other work");
    }

    #[test]
    fn a_difference_of_some_microseconds_is_no_change() {
        assert!(!row(&[6.6e-6]).is_slower(&row(&[3.2e-6]), 0.1, 0.5));
        assert!(row(&[20e-6]).is_slower(&row(&[10e-6]), 0.1, 0.5));
    }

    #[test]
    fn a_ratio_that_is_no_change_has_a_reason() {
        let uncounted = |now: &[f64], then: &[f64], ranks_per_core| {
            let (now, then) = (row(now), row(then));
            let why = now.uncounted(&then, 0.1, ranks_per_core);
            assert_eq!(why, then.uncounted(&now, 0.1, ranks_per_core), "the other way round it is the same");
            why
        };
        assert_eq!(uncounted(&[1.05], &[1.0], 0.5), None);
        assert_eq!(uncounted(&[6.6e-6], &[3.2e-6], 0.5), Some(Uncounted::Microseconds));
        assert_eq!(uncounted(&[2e-3], &[1e-3], 4.0), Some(Uncounted::SharedCores));
        let busy = [1.3, 1.3, 1.3, 9.0, 9.0, 9.0, 9.0];
        assert_eq!(uncounted(&busy, &[1.0], 0.5), Some(Uncounted::Busy));
        assert_eq!(uncounted(&[1.0, 1.3, 1.3, 1.3], &[1.0], 0.5), Some(Uncounted::QuickBatch));
        assert_eq!(uncounted_text(Uncounted::Microseconds, 2), "2 rows differ by less than 8 us per call");
    }

    #[test]
    fn turns_of_the_scheduler_are_no_change() {
        assert!(!row(&[2e-3]).is_slower(&row(&[1e-3]), 0.1, 4.0), "the ranks shared cores");
        assert!(row(&[4e-3]).is_slower(&row(&[2e-3]), 0.1, 4.0));
    }
}
