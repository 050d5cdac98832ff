//! The report as a table for a terminal, with or without colours.

use super::report::{Dimension, Measurement, Report, SlowDimension, SlowGroup};
use super::verify::Wrong;
use crate::columns::Columns;
use crate::style::{Style, When};

/// The most wrong results, slow groups and slow ranks that are told in full.
const TOLD: usize = 10;
/// The most ranks of a group that are listed.
const MEMBERS: usize = 8;

/// The whole report.
pub fn text(report: &Report) -> String {
    let style = Style::new(When::Auto, &std::io::stdout());
    let hosts = report.hosts.len();
    let mut out = format!(
        "{}\n{} rank{} on {hosts} host{}, started by {}; {}, NCCL {}; {}\n",
        style.bold(&report.mesh),
        report.world_size,
        if report.world_size == 1 { "" } else { "s" },
        if hosts == 1 { "" } else { "s" },
        report.launcher,
        report.library,
        report.library_version,
        report.dtype
    );
    if hosts > 1 {
        for host in report.hosts.iter().take(TOLD) {
            out += &format!("  {}: {}\n", host.name, runs(&host.ranks));
        }
        out += &more(hosts);
    }
    let calls: usize = report.dimensions.iter().map(|dimension| dimension.verified_calls).sum();
    out += &match report.wrong.is_empty() {
        true => format!("verified: {calls} calls of all ranks, every element is right\n"),
        false => format!(
            "{}: {} wrong results in {calls} calls of all ranks\n",
            style.bold("wrong data"),
            report.wrong.len()
        ),
    };
    out += &table(report, style);
    for wrong in report.wrong.iter().take(TOLD) {
        out += &format!("{} {}\n", style.bold("wrong:"), wrong_text(wrong));
    }
    out += &more(report.wrong.len());
    for slow in &report.slow_dimensions {
        let SlowDimension { dimension, collective, busbw_gbps, expected_gbps, .. } = slow;
        let size = bytes(slow.bytes);
        out += &format!(
            "{} {dimension} as a whole: {busbw_gbps:.2} GB/s of bus bandwidth for {collective} of {size}, expected {expected_gbps}\n",
            style.bold("slow:")
        );
    }
    for slow in report.slow_groups.iter().take(TOLD) {
        out += &format!("{} {}\n", style.bold("slow:"), slow_text(slow));
    }
    out += &more(report.slow_groups.len());
    for slow in report.slow_ranks.iter().take(TOLD) {
        let how = match slow.times {
            Some(times) => format!("copies in its own memory {times:.1} times as slowly as the other ranks"),
            None => "is where the slow groups of several dimensions cross".to_owned(),
        };
        out += &format!("{} rank {} on {} {how}\n", style.bold("slow:"), slow.rank, slow.host);
    }
    out += &more(report.slow_ranks.len());
    if report.ranks_per_core > 1.0 {
        let per_core = report.ranks_per_core;
        out += &style
            .dim(&format!("up to {per_core:.1} ranks share a core: times are the scheduler's as much as the mesh's"));
        out.push('\n');
    }
    out + &format!("{} {} ({:.1} s){}\n", style.bold("verdict:"), report.verdict, report.seconds, next(report))
}

/// Says what the user can do next.
fn next(report: &Report) -> &'static str {
    match report.verdict {
        "wrong" => {
            "; next: check again without the ranks and hosts named; NCCL_ALGO and NCCL_PROTO tell whether one way of the library is at fault"
        }
        "slow" => {
            "; next: check again without the ranks and hosts named, and look there at clocks, links and what else runs"
        }
        _ => "",
    }
}

fn more(found: usize) -> String {
    if found > TOLD { format!("... and {} more (--json has all)\n", found - TOLD) } else { String::new() }
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

fn slow_text(slow: &SlowGroup) -> String {
    let SlowGroup { dimension, ranks, hosts, times, evidence } = slow;
    let what: Vec<String> =
        evidence.iter().take(3).map(|found| format!("{} of {}", found.collective, bytes(found.bytes))).collect();
    let rest = if evidence.len() > 3 { format!(" and {} more", evidence.len() - 3) } else { String::new() };
    let hosts = hosts.iter().take(MEMBERS).cloned().collect::<Vec<_>>().join(", ");
    format!(
        "{dimension} {} on {hosts} takes up to {times:.1} times as long as the other groups of {dimension}, for {}{rest}",
        members(ranks),
        what.join(", ")
    )
}

/// The ranks of a host, which are in ascending order: "ranks 0-3, 8".
fn runs(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let listed: Vec<String> = runs.iter().take(MEMBERS).map(text).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let rest = if runs.len() > MEMBERS { format!(", ... {} ranks", ranks.len()) } else { String::new() };
    format!("{noun} {}{rest}", listed.join(", "))
}

fn members(ranks: &[i32]) -> String {
    let listed: Vec<String> = ranks.iter().take(MEMBERS).map(i32::to_string).collect();
    let rest = if ranks.len() > MEMBERS { format!(", ... {} ranks", ranks.len()) } else { String::new() };
    format!("{{{}{rest}}}", listed.join(", "))
}

const HEADS: [&str; 9] =
    ["dimension", "ranks", "groups", "collective", "latency", "size", "time", "algbw GB/s", "busbw GB/s"];

/// The table: for each dimension and collective the time of the smallest size and the bandwidths of
/// the largest.
fn table(report: &Report, style: Style) -> String {
    let mut rows: Vec<[String; 9]> = Vec::new();
    for dimension in &report.dimensions {
        let mut last = "";
        let Dimension { name, size, groups, measurements, .. } = dimension;
        let mut about = [name.clone(), size.to_string(), groups.to_string()];
        for (at, measured) in measurements.iter().enumerate() {
            if measured.collective == last {
                continue;
            }
            last = measured.collective;
            let of_same = measurements[at..].iter().take_while(|other| other.collective == last);
            let largest: &Measurement = of_same.last().unwrap_or(measured);
            let [name, size, groups] = std::mem::take(&mut about);
            let cells = [
                last.to_owned(),
                time(measured.seconds),
                bytes(largest.bytes),
                time(largest.seconds),
                format!("{:.2}", largest.algbw_gbps),
                format!("{:.2}", largest.busbw_gbps),
            ];
            let [collective, latency, largest_size, largest_time, algbw, busbw] = cells;
            rows.push([name, size, groups, collective, latency, largest_size, largest_time, algbw, busbw]);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let columns = Columns::new(&HEADS, &rows, |column| [0, 3].contains(&column));
    let mut out = format!("\n{}\n", style.dim(columns.line(&HEADS).trim_end()));
    for row in &rows {
        out += &format!("{}\n", columns.line(row).trim_end());
    }
    let copies: Vec<f64> = report.ranks.iter().filter_map(|rank| rank.copy_gbps).collect();
    if let (Some(least), Some(most)) =
        (copies.iter().copied().reduce(f64::min), copies.iter().copied().reduce(f64::max))
    {
        out += &style.dim(&format!("copies in each rank's own memory: {least:.1} to {most:.1} GB/s"));
        out.push('\n');
    }
    out.push('\n');
    out
}

fn time(seconds: f64) -> String {
    match seconds {
        short if short < 1e-3 => format!("{:.1} us", short * 1e6),
        middle if middle < 1.0 => format!("{:.2} ms", middle * 1e3),
        long => format!("{long:.2} s"),
    }
}

fn bytes(bytes: usize) -> String {
    match bytes {
        whole if whole >= 1 << 20 && whole % (1 << 20) == 0 => format!("{} MiB", whole >> 20),
        whole if whole >= 1 << 10 && whole % (1 << 10) == 0 => format!("{} KiB", whole >> 10),
        odd => format!("{odd} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn the_ranks_of_a_host_are_listed_in_runs() {
        assert_eq!(runs(&[3]), "rank 3");
        assert_eq!(runs(&[0, 1, 2, 8]), "ranks 0-2, 8");
        assert_eq!(runs(&(0..40).step_by(2).collect::<Vec<_>>()), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... 20 ranks");
    }
}
