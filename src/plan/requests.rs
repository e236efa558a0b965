//! Parser of `--requests`: `1:4096,8*1:1024,64:700`.
//!
//! ```text
//! list    = group { "," group }
//! group   = [ count "*" ] qo_len ":" kv_len        spaces are allowed except inside numbers
//! ```

use super::input::RequestLengths;
use crate::text_error::TextError;
use miette::{Report, Result};
use std::ops::{Range, RangeInclusive};

const HELP: &str =
    "a request is qo_len:kv_len, and 8*1:4096 is eight of the same: --requests 1:4096,8*1:1024,64:700";

/// All requests of `list`, repetitions expanded.
pub(super) fn parse(list: &str) -> Result<Vec<RequestLengths>> {
    let mut requests = Vec::new();
    let mut begin = 0;
    for group in list.split(',') {
        let (count, request) = ListSpan { list, at: begin..begin + group.len() }.group()?;
        requests.extend(std::iter::repeat_n(request, count));
        begin += group.len() + 1;
    }
    Ok(requests)
}

/// A part of the list, by byte range.
struct ListSpan<'a> {
    list: &'a str,
    at: Range<usize>,
}

impl<'a> ListSpan<'a> {
    fn text(&self) -> &'a str {
        &self.list[self.at.clone()]
    }

    /// The parts before and after the first `separator`.
    fn split(&self, separator: char) -> Option<(Self, Self)> {
        let found = self.at.start + self.text().find(separator)?;
        let part = |at| Self { list: self.list, at };
        Some((part(self.at.start..found), part(found + 1..self.at.end)))
    }

    fn group(&self) -> Result<(usize, RequestLengths)> {
        let (count, request) = match self.split('*') {
            Some((count, request)) => (count.number("a number of requests", 1..=1 << 20)?, request),
            None => (1, Self { list: self.list, at: self.at.clone() }),
        };
        let Some((qo, kv)) = request.split(':') else {
            return Err(request.error("expected qo_len:kv_len"));
        };
        let lengths = 0..=i32::MAX as usize;
        let qo = qo.number("qo_len, the number of query rows", lengths.clone())?;
        Ok((count, RequestLengths { qo, kv: kv.number("kv_len, the number of keys", lengths)? }))
    }

    fn number(&self, what: &str, range: RangeInclusive<usize>) -> Result<usize> {
        let number: usize = match self.text().trim().parse() {
            Ok(number) => number,
            Err(_) => return Err(self.error(&format!("expected {what}"))),
        };
        if range.contains(&number) {
            return Ok(number);
        }
        Err(self.error(&format!("expected {what}, in {}..={}", range.start(), range.end())))
    }

    /// An error at this part, without surrounding spaces.
    fn error(&self, label: &str) -> Report {
        let text = self.text();
        let start = self.at.start + text.len() - text.trim_start().len();
        let word = text.trim();
        let message = if word.is_empty() {
            "--requests: a part is missing".to_owned()
        } else {
            format!("--requests: cannot read `{word}`")
        };
        let at = if word.is_empty() { self.at.clone() } else { start..start + word.len() };
        TextError::in_argument("--requests", self.list, at, [message, label.to_owned(), HELP.to_owned()])
    }
}

#[cfg(test)]
mod tests {
    use super::{RequestLengths, parse};

    #[test]
    fn repetitions_are_expanded() {
        let decode = RequestLengths { qo: 1, kv: 4096 };
        let chunk = RequestLengths { qo: 64, kv: 700 };
        assert_eq!(parse("2*1:4096,64:700").unwrap(), [decode, decode, chunk]);
        assert_eq!(parse(" 64 : 700 , 1 * 1:4096 ").unwrap(), [chunk, decode]);
        assert_eq!(parse("0:0").unwrap(), [RequestLengths { qo: 0, kv: 0 }]);
    }

    #[test]
    fn errors_quote_the_invalid_part() {
        for (list, words) in [
            ("", "a part is missing"),
            ("1:2,", "a part is missing"),
            ("1:2,,1:3", "a part is missing"),
            ("1:", "a part is missing"),
            ("*1:2", "a part is missing"),
            ("1:2,17,1:3", "cannot read `17`"),
            ("1:4k", "cannot read `4k`"),
            ("1:-4", "cannot read `-4`"),
            ("1:2:3", "cannot read `2:3`"),
            ("0*1:2", "cannot read `0`"),
            ("1:2147483648", "cannot read `2147483648`"),
            ("x*1:2", "cannot read `x`"),
        ] {
            assert_eq!(parse(list).unwrap_err().to_string(), format!("--requests: {words}"), "{list}");
        }
    }
}
