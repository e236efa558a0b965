//! Progress on standard error, in one line that fits a terminal of any width; hidden without a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Result};

/// A bar of `length` steps after `message`; hidden for 0.
pub(crate) fn bar(message: &'static str, length: u64) -> Result<ProgressBar> {
    if length == 0 {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} %").into_diagnostic()?;
    Ok(ProgressBar::new(length).with_style(style).with_message(message))
}

/// A count of `length` steps after `verb`, with a message, cut to the width, about the current one.
pub(crate) fn count(verb: &str, length: u64) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix} {pos}/{len} {wide_msg}").into_diagnostic()?;
    Ok(ProgressBar::new(length).with_style(style).with_prefix(verb.to_owned()))
}

/// A count of generated tokens and their rate; hidden if the text itself is streamed.
pub(crate) fn tokens(is_hidden: bool) -> Result<ProgressBar> {
    if is_hidden {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("{spinner} {wide_msg}").into_diagnostic()?;
    Ok(ProgressBar::new_spinner().with_style(style))
}

/// Adds a token to [`tokens`].
pub(crate) fn add_token(tokens: &ProgressBar) {
    tokens.inc(1);
    tokens.set_message(format!("{} tokens, {:.0}/s", tokens.position(), tokens.per_sec()));
}

#[cfg(test)]
mod tests {
    use super::{add_token, bar, count, tokens};
    use indicatif::{ProgressBar, ProgressDrawTarget, TermLike};
    use std::{
        io::Result,
        sync::{Arc, Mutex},
    };

    /// A terminal that keeps the widest line.
    #[derive(Debug)]
    struct NarrowTerminal {
        width: u16,
        widest: Arc<Mutex<usize>>,
    }

    impl TermLike for NarrowTerminal {
        fn width(&self) -> u16 {
            self.width
        }
        fn move_cursor_up(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> Result<()> {
            self.write_str(line)
        }
        fn write_str(&self, line: &str) -> Result<()> {
            let mut widest = self.widest.lock().unwrap();
            *widest = (*widest).max(line.chars().count());
            Ok(())
        }
        fn clear_line(&self) -> Result<()> {
            Ok(())
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    /// The widest line of a progress in a terminal of `width` columns.
    fn widest(width: u16, progress: &ProgressBar) -> usize {
        let widest = Arc::new(Mutex::new(0));
        let terminal = NarrowTerminal { width, widest: widest.clone() };
        progress.set_draw_target(ProgressDrawTarget::term_like(Box::new(terminal)));
        progress.tick();
        *widest.lock().unwrap()
    }

    #[test]
    fn progress_fits_terminals_of_any_width() {
        for width in (20..=40).chain([80, 200]) {
            let loading = bar("to the GPU", 123_456_789_012).unwrap();
            loading.set_position(98_765_432_109);
            let assembling = count("assembling", 162).unwrap();
            assembling.set_message("attention_bf16_bf16_d128_128_few_sm120 for sm_120");
            let generating = tokens(false).unwrap();
            generating.set_position(123_456_789_012_345);
            add_token(&generating);
            let widths = [&loading, &assembling, &generating].map(|progress| widest(width, progress));
            assert!(
                widths.iter().all(|&columns| columns > 10 && columns <= width.into()),
                "{width}: {widths:?}"
            );
        }
    }
}
