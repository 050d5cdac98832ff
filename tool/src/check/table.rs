//! The table of the report: for each dimension a row for each collective and size.

use std::collections::BTreeMap;

use super::compare::{row_name, uncounted_text};
use super::report::{Comparison, Dimension, Measurement, Report, Uncounted};
use super::words::{TINY, bytes, gbps, time};
use crate::columns::Columns;
use crate::style::Style;
use crate::words::count;

/// The heads of the columns. The table has the last column only with `--compare`, and is then 60
/// characters wide, or a few more where a link is slow.
const HEADS: [&str; 6] = ["  collective", "size", "time", "algbw", "busbw", "ratio"];

/// The table. It is empty where nothing was measured.
pub fn table(report: &Report, style: Style) -> String {
    let heads = if report.comparison.is_some() { &HEADS[..] } else { &HEADS[..5] };
    let rows: Vec<Vec<Vec<String>>> = report.dimensions.iter().map(|dimension| rows(dimension, report)).collect();
    let all: Vec<&Vec<String>> = rows.iter().flatten().collect();
    if all.is_empty() {
        return String::new();
    }
    let columns = Columns::new(heads, &all, |column| column == 0);
    let about = match heads.len() {
        5 => "the median group; bandwidths in GB/s, for 1 KiB and more",
        _ => "the median group; bandwidths in GB/s, for 1 KiB and more; ratio: quickest batches / those in the record",
    };
    let mut out = format!("\n{}\n{}\n", style.dim(about), style.dim(columns.line(heads).trim_end()));
    for (Dimension { name, size, groups, .. }, rows) in report.dimensions.iter().zip(&rows) {
        if !rows.is_empty() {
            out += &format!("{}: {} of {size} ranks\n", style.bold(name), count(*groups, "group"));
        }
        for row in rows {
            out += &format!("{}\n", columns.line(row).trim_end());
        }
    }
    if let Some(note) = report.comparison.as_ref().and_then(|comparison| footnote(comparison, report)) {
        out += &format!("{}\n", style.dim(&note));
    }
    out.push('\n');
    out
}

/// Returns the line that says why ratios with a star are no change although they look like one.
fn footnote(comparison: &Comparison, report: &Report) -> Option<String> {
    let mut rows: BTreeMap<Uncounted, usize> = BTreeMap::new();
    for Dimension { name, size, groups, measurements, .. } in &report.dimensions {
        for row in measurements {
            let ratio = comparison.ratio(&row_name(name, *size, *groups, row.collective, row.bytes));
            if let Some(why) = ratio.and_then(|ratio| ratio.uncounted) {
                *rows.entry(why).or_default() += 1;
            }
        }
    }
    let whys: Vec<String> = rows.into_iter().map(|(why, rows)| uncounted_text(why, rows)).collect();
    let percent = comparison.tolerance * 100.0;
    let why = whys.join("; ");
    (!why.is_empty()).then(|| format!("* more than {percent:.0}% apart, but neither slower nor faster: {why}"))
}

/// The rows of a dimension.
fn rows(dimension: &Dimension, report: &Report) -> Vec<Vec<String>> {
    let Dimension { name, size, groups, measurements, .. } = dimension;
    let row = |row: &Measurement| {
        let bandwidth = |value: f64| if row.bytes < TINY { "-".to_owned() } else { gbps(value) };
        let mut cells = vec![
            format!("  {}", row.collective),
            bytes(row.bytes),
            time(row.seconds),
            bandwidth(row.algbw_gbps),
            bandwidth(row.busbw_gbps),
        ];
        if let Some(comparison) = &report.comparison {
            let ratio = comparison.ratio(&row_name(name, *size, *groups, row.collective, row.bytes));
            // Without a star there is a space, so that the decimal points are aligned.
            let star = |is_marked: bool| if is_marked { "*" } else { " " };
            cells.push(
                ratio.map_or("- ".to_owned(), |ratio| format!("{:.2}{}", ratio.times, star(ratio.uncounted.is_some()))),
            );
        }
        cells
    };
    measurements.iter().map(row).collect()
}
