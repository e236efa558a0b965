//! What happened, in a few lines for a person, beside what the machine could do at best.

use std::{fmt::Write, time::Duration};
use tilewright::{Backend, Cpu, Roofline};
use tilewright_serve::{Report, Work};

/// Measures the machine's ceilings and sets the report beside them.
pub(super) fn text(report: &Report, cpu: &Cpu) -> String {
    let roofline = cpu.measure_roofline();
    let mut text = format!("\n{}\n", cpu.describe());
    for (name, tokens, time, work) in [
        ("prefill", report.prefill_tokens, report.prefill_time, report.prefill_work),
        ("decode", report.decode_tokens, report.decode_time, report.decode_work),
    ] {
        if tokens > 0 {
            let _ = writeln!(text, "{name:9} {}", phase(tokens, time, &work, &roofline));
        }
    }
    let total = report.prefill_time + report.decode_time;
    let share = 100.0 * report.attention_time.as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE);
    let _ =
        writeln!(text, "attention {share:.0} % of {:.2} s in {} steps", total.as_secs_f64(), report.steps);
    let _ = writeln!(
        text,
        "pages     {} of {} used at most, {} reused ({} tokens not computed again), {} preemptions",
        report.peak_pages, report.num_pages, report.reused_pages, report.reused_tokens, report.preemptions
    );
    let _ = writeln!(
        text,
        "roofline  {:.1} GB/s, {:.0} GFLOP/s (measured now)",
        roofline.bytes_per_second / 1e9,
        roofline.flops_per_second / 1e9
    );
    text
}

fn phase(tokens: usize, time: Duration, work: &Work, roofline: &Roofline) -> String {
    let least = work.estimate(roofline);
    let rate = |seconds: f64| tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    format!(
        "{tokens} tokens in {:.3} s: {:.0} tokens/s; {} bounds it at {:.0} tokens/s",
        time.as_secs_f64(),
        rate(time.as_secs_f64()),
        least.bound(),
        rate(least.seconds())
    )
}
