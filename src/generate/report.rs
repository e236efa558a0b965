//! Statistics of a run, compared with the machine's roofline.

use std::{fmt::Write, time::Duration};
use tilewright::{Backend, Cpu, Roofline};
use tilewright_cuda::Cuda;
use tilewright_serve::{Report, Work};

/// The engine's report, with the texts that it did not finish.
pub(super) struct RunReport {
    pub(super) engine: Report,
    /// Texts with an invalid prompt.
    pub(super) rejected: usize,
    /// Texts that Ctrl-C ended.
    pub(super) interrupted: usize,
}

/// Name, tokens, time and work of each phase with tokens.
fn phases(report: &Report) -> impl Iterator<Item = (&'static str, usize, Duration, Work)> {
    let phases = [
        ("prefill", report.prefill_tokens, report.prefill_time, report.prefill_work),
        ("decode", report.decode_tokens, report.decode_time, report.decode_work),
    ];
    phases.into_iter().filter(|phase| phase.1 > 0)
}

/// The report of a CPU run, with the measured roofline.
pub(super) fn of_cpu(run: &RunReport, cpu: &Cpu) -> String {
    let report = &run.engine;
    let roofline = cpu.measure_roofline();
    let mut text = format!("\n{}\n", cpu.describe());
    for (name, tokens, time, work) in phases(report) {
        let _ = writeln!(text, "{name:9} {}", phase(tokens, time, &work, &roofline));
    }
    let total = report.prefill_time + report.decode_time;
    let share = 100.0 * report.attention_time.as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE);
    let _ =
        writeln!(text, "attention {share:.0} % of {:.2} s in {} steps", total.as_secs_f64(), report.steps);
    text.push_str(&pages(report));
    text.push_str(&finished(run));
    let _ = writeln!(
        text,
        "roofline  {:.1} GB/s, {:.0} GFLOP/s (measured now)",
        roofline.bytes_per_second / 1e9,
        roofline.flops_per_second / 1e9
    );
    text
}

pub(super) fn of_gpu(run: &RunReport, gpu: &Cuda) -> String {
    let report = &run.engine;
    let mut text = format!("\n{}\n", gpu.describe());
    for (name, tokens, time, work) in phases(report) {
        let seconds = time.as_secs_f64().max(f64::MIN_POSITIVE);
        let _ = writeln!(
            text,
            "{name:9} {tokens} tokens in {seconds:.3} s: {:.0} tokens/s, {:.1} GB/s, {:.1} TFLOP/s",
            tokens as f64 / seconds,
            work.bytes / seconds / 1e9,
            work.flops / seconds / 1e12
        );
    }
    let _ = writeln!(text, "steps     {}, {} of them replayed a graph", report.steps, report.replays);
    text.push_str(&pages(report));
    text.push_str(&finished(run));
    text
}

fn pages(report: &Report) -> String {
    format!(
        "pages     {} of {} used at most, {} reused ({} tokens not computed again), {} preemptions\n",
        report.peak_pages, report.num_pages, report.reused_pages, report.reused_tokens, report.preemptions
    )
}

/// The number of texts per finish reason.
fn finished(run: &RunReport) -> String {
    let counts = run.engine.finished;
    let reasons = [
        (counts.stop, "stop"),
        (counts.length, "length (--max-tokens)"),
        (counts.context, "context (the model's maximum)"),
        (counts.pages, "pages (--pages)"),
        (counts.failed + run.rejected, "failed"),
        (run.interrupted, "interrupted"),
    ];
    let counted = reasons.iter().filter(|(count, _)| *count > 0);
    let counted: Vec<_> = counted.map(|(count, reason)| format!("{count} {reason}")).collect();
    format!("finished  {}\n", counted.join(", "))
}

fn phase(tokens: usize, time: Duration, work: &Work, roofline: &Roofline) -> String {
    let estimate = work.estimate(roofline);
    let rate = |seconds: f64| tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    format!(
        "{tokens} tokens in {:.3} s: {:.0} tokens/s; {} bounds it at {:.0} tokens/s",
        time.as_secs_f64(),
        rate(time.as_secs_f64()),
        estimate.bound(),
        rate(estimate.seconds())
    )
}
