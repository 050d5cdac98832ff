//! The report as text for a terminal, with or without colours.

use super::report::{
    Change, Comparison, Pair, PairEvidence, Pairs, Report, SlowDimension, SlowGroup, SlowHost, SlowPair, SlowRank,
    shared_machines,
};
use super::table::table;
use super::verify::Wrong;
use super::words::{TINY, bytes, gbps, listed, members, runs, time};
use crate::style::{Style, When};
use crate::terminal;
use crate::words::{count, listed as first_of, listed_with};

/// The name of the kind of pairs whose ranks are on two hosts, in the report.
const BETWEEN: &str = "between hosts";
/// The most entries that are listed of each kind: wrong results, slow groups, slow ranks and so on.
const TOLD: usize = 10;

/// The whole report, broken between words where standard output is a terminal.
pub fn text(report: &Report) -> String {
    let style = Style::new(When::Auto, &std::io::stdout());
    let mut out = head(report, style);
    out += &table(report, style);
    out += &copies(report, style);
    out += &pairs(report);
    let between = between(report);
    let list = |what: &str, lines: Vec<String>| {
        let lines = lines.iter().map(|line| format!("{} {line}\n", style.bold(what)));
        listed_with(lines, TOLD, "", more)
    };
    out += &list("wrong:", report.wrong.iter().map(wrong_text).collect());
    out += &list("slow:", report.slow_dimensions.iter().map(dimension_text).collect());
    out += &list("slow:", report.slow_hosts.iter().map(|slow| host_text(slow, between)).collect());
    out += &list("slow:", report.slow_pairs.iter().map(|slow| pair_text(slow, between)).collect());
    out += &list("slow:", report.slow_groups.iter().map(group_text).collect());
    out += &list("slow:", report.slow_ranks.iter().map(rank_text).collect());
    if let Some(comparison) = &report.comparison {
        out += &compared(comparison);
        out += &list("slower:", comparison.slower.iter().map(change_text).collect());
        out += &list("faster:", comparison.faster.iter().map(change_text).collect());
    }
    if report.ranks_per_core > 1.0 {
        let per_core = report.ranks_per_core;
        out += &style
            .dim(&format!("up to {per_core:.1} ranks share a core: times are the scheduler's as much as the mesh's"));
        out.push('\n');
    }
    out += &format!("{} {} ({:.1} s){}\n", style.bold("verdict:"), report.verdict, report.seconds, next(report));
    terminal::wrap(&out, terminal::width())
}

/// Says what was checked, and where.
fn head(report: &Report, style: Style) -> String {
    let hosts = report.hosts.len();
    let machines = shared_machines(&report.hosts);
    let is_one_machine = machines.iter().any(|shared| shared.len() == hosts);
    let mut out = format!(
        "{}\n{} on {}{}, {}; {}, NCCL {}; {}\n",
        style.bold(&report.mesh),
        count(report.world_size, "rank"),
        count(hosts, "host"),
        if is_one_machine { " of one machine" } else { "" },
        started(&report.launcher),
        report.library,
        report.library_version,
        report.dtype
    );
    if hosts > 1 {
        let lines = report.hosts.iter().map(|host| format!("  {}: {}\n", host.name, runs(&host.ranks)));
        out += &listed_with(lines, TOLD, "", more);
    }
    if !is_one_machine {
        let lines = machines.iter().map(|shared| format!("  on one machine: {}\n", listed(shared)));
        out += &listed_with(lines, TOLD, "", more);
    }
    let calls: usize = report.dimensions.iter().map(|dimension| dimension.verified_calls).sum();
    out + &match report.wrong.is_empty() {
        true => format!("verified: {calls} calls of all ranks, every element is right\n"),
        false => format!(
            "{}: {} wrong results in {calls} calls of all ranks\n",
            style.bold("wrong data"),
            report.wrong.len()
        ),
    }
}

/// How the ranks were started. The library calls a rank "alone" that no launcher has started.
fn started(launcher: &str) -> String {
    match launcher {
        "alone" => "started without a launcher".to_owned(),
        launcher => format!("started by {launcher}"),
    }
}

/// The range of the copies in the ranks' own memory.
fn copies(report: &Report, style: Style) -> String {
    let copies: Vec<f64> = report.ranks.iter().filter_map(|rank| rank.copy_gbps).collect();
    let (least, most) = (copies.iter().copied().reduce(f64::min), copies.iter().copied().reduce(f64::max));
    match (least, most) {
        (Some(least), Some(most)) => {
            let (least, most) = (gbps(least), gbps(most));
            style.dim(&format!("copies in each rank's own memory: {least} to {most} GB/s")) + "\n"
        }
        _ => String::new(),
    }
}

/// The words for the pairs between hosts. Where all hosts are on one machine, the words say so,
/// because the figures then do not measure a network.
fn between(report: &Report) -> &'static str {
    match shared_machines(&report.hosts)[..] {
        [ref hosts] if hosts.len() == report.hosts.len() => "between hosts of one machine",
        _ => BETWEEN,
    }
}

/// The words for a kind of pairs. `between` has the words for the pairs between hosts.
fn words_of(kind: &'static str, between: &'static str) -> &'static str {
    if kind == BETWEEN { between } else { kind }
}

/// The pairs: the median of each size, the slowest pair and the slowest host.
fn pairs(report: &Report) -> String {
    let mut out = String::new();
    for pairs in &report.pairs {
        let Pairs { pairs: count, left_out, slowest, .. } = pairs;
        let kind = words_of(pairs.kind, between(report));
        let left = if *left_out > 0 { format!(" ({left_out} more were left out)") } else { String::new() };
        let (size, value) = (bytes(pairs.bytes), speed(pairs.bytes, pairs.seconds));
        if *count == 1 {
            out += &format!("pairs {kind}, {size}: {value}, 1 pair{left}\n");
            continue;
        }
        let Pair { ranks, hosts, seconds, .. } = slowest;
        out += &format!(
            "pairs {kind}, {size}: {value}, median of {count} pairs{left}\n  slowest pair: {}, {}\n",
            names(ranks, hosts),
            speed(pairs.bytes, *seconds)
        );
    }
    let largest = report.pairs.last().map_or(0, |pairs| pairs.bytes);
    let seconds = |gbps: f64| largest as f64 / gbps / 1e9;
    let mut hosts: Vec<_> = report.hosts.iter().filter_map(|host| Some((&host.name, host.pair_gbps?))).collect();
    hosts.sort_by(|a, b| a.1.total_cmp(&b.1));
    if let [(name, slowest), _, _, ..] = hosts[..] {
        out += &format!(
            "  slowest host: {name}, {} with the others, median of {} hosts {}\n",
            speed(largest, seconds(slowest)),
            hosts.len(),
            speed(largest, seconds(hosts[hosts.len() / 2].1))
        );
    }
    out
}

/// The speed of an exchange: a bandwidth, or a time where the data is so small that its bandwidth
/// says nothing.
fn speed(bytes: usize, seconds: f64) -> String {
    match bytes {
        small if small < TINY => time(seconds),
        _ => format!("{} GB/s", gbps(bytes as f64 / seconds / 1e9)),
    }
}

/// A pair as "rank 0 on alpha - rank 2 on gamma".
fn names(ranks: &[usize; 2], hosts: &[String; 2]) -> String {
    format!("rank {} on {} - rank {} on {}", ranks[0], hosts[0], ranks[1], hosts[1])
}

/// Says what the user can do next.
fn next(report: &Report) -> String {
    let names_a_place = !(report.slow_groups.is_empty()
        && report.slow_ranks.is_empty()
        && report.slow_pairs.is_empty()
        && report.slow_hosts.is_empty());
    match (report.verdict, &report.comparison) {
        ("wrong", _) => "; next: check again without the ranks and hosts named; NCCL_ALGO and NCCL_PROTO tell whether one way of the library is at fault".to_owned(),
        ("slow", _) if names_a_place => {
            "; next: check again without the ranks and hosts named, and look there at clocks, links and what else runs"
                .to_owned()
        }
        ("slow", Some(Comparison { slower, tolerance, .. })) if !slower.is_empty() => format!(
            "; next: run the comparison again; if the figures vary from run to run, allow more with --tolerance {:.0}%",
            (tolerance * 300.0).max(30.0)
        ),
        ("slow", _) => {
            "; next: check again; if the figures stay, look at what all groups of the dimension share: the network, and the settings of the library".to_owned()
        }
        _ => String::new(),
    }
}

fn more(left: usize) -> String {
    format!("... and {left} more (--json has all)\n")
}

fn wrong_text(wrong: &Wrong) -> String {
    let Wrong { dimension, call, count, rank, host, index, elements, of, .. } = wrong;
    let what = match (wrong.expected, wrong.got) {
        (Some(expected), got) => {
            let from = wrong.source.map_or(String::new(), |source| format!(" (of rank {source})"));
            let got = got.map_or("NaN".to_owned(), |got| got.to_string());
            format!("element {index}{from} is {got}, not {expected}; {elements} of {of} are wrong")
        }
        _ => format!("it wrote past the end of the {of} elements, at {index}"),
    };
    format!("{call} along {dimension} {}, {count} elements, on rank {rank} on {host}: {what}", members(&wrong.group))
}

fn dimension_text(slow: &SlowDimension) -> String {
    let SlowDimension { dimension, collective, busbw_gbps, expected_gbps, .. } = slow;
    let (size, busbw) = (bytes(slow.bytes), gbps(*busbw_gbps));
    format!(
        "{dimension} as a whole: {busbw} GB/s of bus bandwidth for {collective} of {size}, expected {expected_gbps}"
    )
}

fn group_text(slow: &SlowGroup) -> String {
    let SlowGroup { dimension, ranks, hosts, times, evidence } = slow;
    let calls = evidence.iter().map(|found| format!("{} of {}", found.collective, bytes(found.bytes)));
    format!(
        "{dimension} {} on {} takes up to {times:.1} times as long as the other groups of {dimension}, for {}",
        members(ranks),
        listed(hosts),
        first_of(calls, 3)
    )
}

fn host_text(slow: &SlowHost, between: &str) -> String {
    let SlowHost { host, times, slow_pairs, pairs, evidence } = slow;
    format!(
        "host {host}: {slow_pairs} of its {pairs} pairs with other hosts take up to {times:.1} times as long as the others: {}",
        evidence_text(between, evidence)
    )
}

fn pair_text(slow: &SlowPair, between: &'static str) -> String {
    let SlowPair { kind, ranks, hosts, times, evidence } = slow;
    let evidence = evidence_text(words_of(kind, between), evidence);
    format!("{} take up to {times:.1} times as long: {evidence}", names(ranks, hosts))
}

/// The times of slow pairs, and the median of the pairs with which each was compared, at each size.
fn evidence_text(kind: &str, evidence: &[PairEvidence]) -> String {
    let one = |found: &PairEvidence| {
        let PairEvidence { bytes: size, seconds, median_seconds, .. } = found;
        let (slow, usual) = (speed(*size, *seconds), speed(*size, *median_seconds));
        format!("{slow} with {}, median of the other pairs {kind} {usual}", bytes(*size))
    };
    evidence.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn rank_text(slow: &SlowRank) -> String {
    let how = match slow.times {
        Some(times) if slow.evidence == "copy" => {
            format!("copies in its own memory {times:.1} times as slowly as the other ranks")
        }
        Some(times) => format!("takes {times:.1} times as long as other pairs, with most ranks it was measured with"),
        None => "is where the slow groups of several dimensions cross".to_owned(),
    };
    format!("rank {} on {} {how}", slow.rank, slow.host)
}

/// The head of the comparison, and what could not be compared.
fn compared(comparison: &Comparison) -> String {
    let Comparison { file, date, tolerance, differences, compared, slower, faster, only_now, only_then, .. } =
        comparison;
    let date = date.as_ref().map_or(String::new(), |date| format!(" of {date}"));
    let again = match comparison.measured_again {
        0 => String::new(),
        1 => "; 1 row that looked slower was measured again".to_owned(),
        rows => format!("; {rows} rows that looked slower were measured again"),
    };
    let mut out = format!(
        "compared with {file}{date}: {compared} rows, {} slower by more than {:.0}%, {} faster{again}\n",
        slower.len(),
        tolerance * 100.0,
        faster.len()
    );
    for difference in differences {
        out += &format!("  differs: {difference}\n");
    }
    for (rows, whose) in [(only_now, "not in the record"), (only_then, "only in the record")] {
        if !rows.is_empty() {
            out += &format!("  not compared: {}, {whose}: {}\n", count(rows.len(), "row"), listed(rows));
        }
    }
    out
}

fn change_text(change: &Change) -> String {
    let Change { row, seconds, then_seconds, times } = change;
    format!("{row}: {}, was {} (ratio {times:.2})", time(*seconds), time(*then_seconds))
}
