//! Parsers of numeric arguments: the range is checked with the argument, so that errors name the flag.

use std::ops::{Bound, RangeBounds};

/// A parser of integers in `range`.
pub(crate) fn integer<T: TryFrom<i128>>(
    range: impl RangeBounds<i128> + Clone + Send + Sync,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| {
        let text = text.trim();
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(format!("expected an integer, {}", describe(&range)));
        }
        let number = text.parse().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("{text} is not {}", describe(&range)))
    }
}

/// A parser of numbers in `range`, which errors call `name`.
pub(crate) fn number(
    name: &'static str,
    range: impl Fn(f32) -> bool + Clone + Send + Sync,
) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync {
    move |text| {
        let number = text.trim().parse::<f32>();
        number.ok().filter(|&number| range(number)).ok_or_else(|| format!("expected {name}"))
    }
}

/// `in 1..=1024`, or `at least 1`.
fn describe(range: &impl RangeBounds<i128>) -> String {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start + 1,
        Bound::Unbounded => 0,
    };
    match range.end_bound() {
        Bound::Included(end) => format!("in {start}..={end}"),
        Bound::Excluded(end) => format!("in {start}..{end}"),
        Bound::Unbounded => format!("at least {start}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{integer, number};

    #[test]
    fn integers_outside_the_range_name_it() {
        let count = integer::<u16>(1..=1024);
        assert_eq!((count("1"), count(" 1024 ")), (Ok(1), Ok(1024)));
        let error = |text: &str| count(text).unwrap_err();
        assert_eq!(error("0"), "0 is not in 1..=1024");
        assert_eq!(error("-3"), "-3 is not in 1..=1024");
        assert_eq!(error(&"9".repeat(60)), format!("{} is not in 1..=1024", "9".repeat(60)));
        for text in ["", "-", "x", "1.5", "1e3", "+-1"] {
            assert_eq!(error(text), "expected an integer, in 1..=1024", "{text:?}");
        }
        let any = integer::<usize>(1..);
        assert_eq!(any(&usize::MAX.to_string()), Ok(usize::MAX));
        assert_eq!(any("0").unwrap_err(), "0 is not at least 1");
        assert_eq!(any("x").unwrap_err(), "expected an integer, at least 1");
    }

    #[test]
    fn numbers_outside_the_range_name_it() {
        let share = number("a number in (0, 1]", |p| p > 0.0 && p <= 1.0);
        assert_eq!((share("1"), share("0.5")), (Ok(1.0), Ok(0.5)));
        for text in ["0", "-0.5", "1.5", "nan", "inf", "x", ""] {
            assert_eq!(share(text).unwrap_err(), "expected a number in (0, 1]", "{text:?}");
        }
    }
}
