//! `strftime_now` for templates that write the date into the prompt, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Weekdays, starting with that of 1 January 1970.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The current time in `format`; an unsupported conversion letter is the error.
pub(super) fn strftime_now(format: &str) -> Result<String, char> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

/// `seconds` since 1970 in `format`: the subset of Python's codes that prompts use.
fn strftime(format: &str, seconds: u64) -> Result<String, char> {
    let (year, month, day) = date(seconds / DAY);
    let (name, weekday) = (MONTHS[month - 1], DAYS[(seconds / DAY % 7) as usize]);
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        text += &match letters.next().unwrap_or('%') {
            'Y' => format!("{year}"),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'B' => name.to_owned(),
            'b' => name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{:02}", seconds / 3600 % 24),
            'M' => format!("{:02}", seconds / 60 % 60),
            'S' => format!("{:02}", seconds % 60),
            '%' => "%".to_owned(),
            other => return Err(other),
        };
    }
    Ok(text)
}

/// Gregorian year, month (1..=12) and day (1..=31), `days` after 1 January 1970.
fn date(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_equal_those_of_python() {
        // datetime.fromtimestamp(seconds, timezone.utc).strftime(format)
        for (seconds, expected) in [
            (0, "Thursday 01 January 1970 00:00:00"),
            (951_782_399, "Monday 28 February 2000 23:59:59"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00"),
            (1_735_689_599, "Tuesday 31 December 2024 23:59:59"),
            (4_107_542_400, "Monday 01 March 2100 00:00:00"),
        ] {
            assert_eq!(strftime("%A %d %B %Y %H:%M:%S", seconds).as_deref(), Ok(expected));
        }
        assert_eq!(strftime("%a %b %m %%", 0).as_deref(), Ok("Thu Jan 01 %"));
        assert_eq!(strftime("%Q", 0), Err('Q'));
    }
}
