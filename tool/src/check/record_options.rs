//! The options of `devicemesh check` about records of earlier checks.

use std::path::PathBuf;

use clap::Args;

/// The options about records. The comments of the fields are their help.
#[derive(Args)]
pub struct RecordOptions {
    /// Write the report to FILE on rank 0's host, for --compare; a FILE that exists is refused
    #[arg(long, value_name = "FILE", conflicts_with = "no_measure")]
    pub save: Option<PathBuf>,
    /// Compare with the report in FILE on rank 0's host, which --save or --json has written
    #[arg(long, value_name = "FILE", conflicts_with = "no_measure")]
    pub compare: Option<PathBuf>,
    /// How much longer than in the record a row may take
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = tolerance, requires = "compare")]
    pub tolerance: f64,
}

/// Reads "10%" or "10" as 0.1.
fn tolerance(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if (0.0..=1e6).contains(&percent) => Ok(percent / 100.0),
        _ => Err("not a share in percent; write it like 10%".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::tolerance;

    #[test]
    fn tolerances_are_in_percent() {
        assert_eq!((tolerance("10%"), tolerance("25")), (Ok(0.1), Ok(0.25)));
        for wrong in ["", "%", "-1%", "nan", "x"] {
            assert!(tolerance(wrong).is_err(), "{wrong}");
        }
    }
}
