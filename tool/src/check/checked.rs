//! A mesh that is being checked: its dimensions are verified and measured, and rank 0 reports.

use std::time::Duration;

use devicemesh::comm::{Buffer, Memory, View};
use devicemesh::error::{Error, Result, Status};
use devicemesh::printable::printable;
use devicemesh::rendezvous::HostIdentity;

use super::again::{self, Again, Plan};
use super::assess::{Measured, Subject, assess};
use super::exit_code::NOT_MADE;
use super::measure::{self, Schedule, Timed};
use super::notes::Notes;
use super::options::Options;
use super::pairs::{self, Meetings};
use super::record::{self, Record};
use super::record_options::RecordOptions;
use super::report::{Comparison, Report};
use super::team::{Exchange, Team};
use super::verify::{self, Bench};
use super::{compare, copies, meetings, text};
use crate::stdio::{print, say};

/// A function that plans further batches from a report, as [`Plan::of_slower`] does.
type PlanOf = fn(&Report, &Schedule, f64, Duration) -> Plan;

/// A mesh that is being checked.
pub struct Checked<'a> {
    pub team: &'a Team,
    pub options: &'a Options,
    /// The dimensions of the mesh, then the flattened ones.
    pub benches: Vec<Bench<'a>>,
    /// All ranks as one dimension.
    pub all_ranks: Bench<'a>,
    /// The sizes that are measured, and how often.
    pub schedule: Schedule,
    /// The earlier report with which rank 0 compares this one.
    pub record: Option<Record>,
}

impl Checked<'_> {
    /// Verifies and measures all dimensions, and has rank 0 report. Gives the exit code, which is
    /// the same on all ranks.
    pub fn all(&self, whole: &View, memory: &Memory, buffers: (&Buffer, &Buffer)) -> Result<u8> {
        let (team, options) = (self.team, self.options);
        let measured: Vec<bool> = self.benches.iter().map(|bench| bench.size() > 1 && !options.no_measure).collect();
        let collectives = options.collectives();
        let mut notes = Notes {
            device: memory.device_name().map(str::to_owned),
            machine: HostIdentity::here().ok().map(|here| here.kernel().to_owned()),
            ranks_per_core: measure::ranks_per_core(team, memory),
            ..Notes::default()
        };
        for bench in &self.benches {
            let mut calls = 0;
            for collective in &collectives {
                let step = format!("verifying {}: {}", bench.name, collective.name());
                let (made, wrong) = team.step(&step, |exchange| verify::verify(bench, *collective, team, exchange))?;
                calls += made;
                notes.wrong.extend(wrong);
            }
            notes.calls.push(calls);
        }
        let wrong = [notes.wrong.len() as f64];
        let wrong = team.step("comparing the data", |exchange| exchange.largest(&wrong))?[0] > 0.0;
        // Where results are wrong, times have no meaning.
        for (bench, measured) in self.benches.iter().zip(&measured) {
            notes.groups.push((bench.group[0], bench.position));
            let mut times: Vec<Vec<Timed>> = Vec::new();
            for collective in collectives.iter().filter(|_| *measured && !wrong) {
                let step = format!("measuring {}: {}", bench.name, collective.name());
                times
                    .push(team.step(&step, |exchange| measure::measure(bench, *collective, &self.schedule, exchange))?);
            }
            notes.times.push(times);
        }
        let mut meetings = Meetings::default();
        if !wrong && !options.no_measure && team.size() > 1 {
            let peers = meetings::meetings(&team.hosts, team.rank());
            meetings = team.step("measuring pairs of ranks", |exchange| {
                pairs::measure(&self.all_ranks, &peers, &self.schedule, team.clock.limit(), exchange)
            })?;
            notes.met = meetings.met(&self.all_ranks);
        }
        if !wrong && !options.no_measure {
            notes.copies = team.step("measuring each rank alone", |exchange| {
                let (repeats, factor) = (self.schedule.repeats, options.slow_factor);
                copies::measure(memory, buffers, repeats, factor, notes.ranks_per_core, exchange)
            })?;
        }
        let again = if wrong { 0 } else { self.measure_again(whole, &mut notes, &mut meetings)? };
        let code = team.step("reporting", |exchange| {
            let report = self.report(whole, &notes, again, exchange)?;
            let code = report.as_ref().map(|report| vec![report.exit_code(options.fail_slow)]);
            if let Some(report) = report {
                team.progress.clear();
                let text = if options.json { report.json() } else { text::text(&report) };
                // The record is written even if the report cannot be printed.
                let printed = print(text).map_err(|failure| Error::internal(failure.message));
                self.save(&report)?;
                printed?;
            }
            exchange.share("code", code)
        })?;
        Ok(code.first().copied().unwrap_or(NOT_MADE))
    }

    /// Measures all rows again for `--save`, and for `--compare` what looks slower than in the
    /// record. Gives the number of the latter rows.
    fn measure_again(&self, whole: &View, notes: &mut Notes, meetings: &mut Meetings) -> Result<usize> {
        let Checked { team, options, benches, all_ranks, schedule, .. } = self;
        let collectives = options.collectives();
        let again = Again { benches, collectives: &collectives, schedule, all_ranks };
        let mut look = |planning: &str, measuring: &str, rows: usize, plan_of: PlanOf| {
            let plan = team.step(planning, |exchange| {
                let report = self.report(whole, notes, rows, exchange)?;
                let plan = report.map(|report| plan_of(&report, schedule, meetings.cost, team.clock.left()));
                Plan::decode(&exchange.share("plan", plan.map(|plan| plan.encode()))?)
            })?;
            if plan.rows() > 0 {
                team.step(measuring, |exchange| again.measure(&plan, &mut notes.times, meetings, exchange))?;
                notes.met = meetings.met(all_ranks);
            }
            Ok::<usize, Error>(plan.rows())
        };
        if options.record.save.is_some() {
            look("planning the record", "measuring over some seconds for the record", 0, Plan::of_record)?;
        }
        let mut rows = 0;
        let looks = if options.record.compare.is_some() { again::LOOKS } else { 0 };
        for _ in 0..looks {
            let slower = look("comparing with the record", "measuring again what looks slower", rows, Plan::of_slower)?;
            if slower == 0 {
                break;
            }
            rows = rows.max(slower);
        }
        Ok(rows)
    }

    /// Writes the record of `--save`, where the report has times.
    fn save(&self, report: &Report) -> Result<()> {
        match &self.options.record.save {
            None => Ok(()),
            Some(file) if report.verdict == "wrong" => {
                let file = file.display().to_string();
                say(&format!("devicemesh check: {} is not written: wrong data has no times", printable(&file)));
                Ok(())
            }
            Some(file) => record::save(file, report).map_err(|message| Error::new(Status::Internal, message)),
        }
    }

    /// The report, on rank 0. `again` is the number of rows that were measured again. This is
    /// called inside a step.
    fn report(&self, whole: &View, mine: &Notes, again: usize, exchange: &Exchange<'_>) -> Result<Option<Report>> {
        let (team, options) = (self.team, self.options);
        let Some(all) = exchange.gather("notes", mine.encode())? else { return Ok(None) };
        let notes: Vec<Notes> = all.iter().map(|notes| Notes::decode(notes)).collect::<Result<_>>()?;
        let collectives = options.collectives();
        let dimensions: Vec<Measured<'_>> =
            self.benches.iter().map(|bench| Measured { name: bench.name, size: bench.size() }).collect();
        let subject = Subject {
            mesh: whole.mesh().describe(),
            library: whole.library()?,
            device_type: team.world().rendezvous().device_type(),
            launcher: team.world().rendezvous().launcher(),
            hosts: &team.hosts,
            dimensions: &dimensions,
            collectives: &collectives,
            schedule: &self.schedule,
            options,
            seconds: team.clock.elapsed().as_secs_f64(),
        };
        let mut report = assess(&subject, &notes);
        let RecordOptions { compare, tolerance, .. } = &options.record;
        if let (Some(record), Some(file), true) = (&self.record, compare, report.verdict != "wrong") {
            let comparison = compare::compare(&report, record, &file.display().to_string(), *tolerance);
            report.compare(Comparison { measured_again: again, ..comparison });
        }
        Ok(Some(report))
    }
}
