//! The table of the report: for each dimension a row for each collective and size.

use super::compare::row_name;
use super::report::{Dimension, Report};
use super::words::{bytes, gbps, time};
use crate::columns::Columns;
use crate::style::Style;

/// The heads of the columns. The last one is there with `--compare`. With it the table is 60
/// characters wide.
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
        5 => "the median group; bandwidths in GB/s",
        _ => "the median group; bandwidths in GB/s; ratio: quickest batches / those in the record",
    };
    let mut out = format!("\n{}\n{}\n", style.dim(about), style.dim(columns.line(heads).trim_end()));
    for (Dimension { name, size, groups, .. }, rows) in report.dimensions.iter().zip(&rows) {
        if !rows.is_empty() {
            let noun = if *groups == 1 { "group" } else { "groups" };
            out += &format!("{}: {groups} {noun} of {size} ranks\n", style.bold(name));
        }
        for row in rows {
            out += &format!("{}\n", columns.line(row).trim_end());
        }
    }
    out.push('\n');
    out
}

/// The rows of a dimension.
fn rows(dimension: &Dimension, report: &Report) -> Vec<Vec<String>> {
    let Dimension { name, size, groups, measurements, .. } = dimension;
    let row = |at: usize| {
        let row = &measurements[at];
        let mut cells = vec![
            format!("  {}", row.collective),
            bytes(row.bytes),
            time(row.seconds),
            gbps(row.algbw_gbps),
            gbps(row.busbw_gbps),
        ];
        if let Some(comparison) = &report.comparison {
            let ratio = comparison.ratio(&row_name(name, *size, *groups, row.collective, row.bytes));
            cells.push(ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")));
        }
        cells
    };
    (0..measurements.len()).map(row).collect()
}
