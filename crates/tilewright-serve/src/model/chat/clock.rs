//! `strftime_now` for templates that write the date into the prompt, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400;
const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
];
/// Weekdays, starting with that of 1 January 1970.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The current time in `format`; an unsupported code is the error.
pub(super) fn strftime_now(format: &str) -> Result<String, String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

/// `seconds` since 1970 in `format`: the codes of Python's `strftime` in the C locale.
fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let mut code = letters.next().unwrap_or('%');
        // glibc's flag against padding.
        let unpadded = code == '-';
        if unpadded {
            code = letters.next().unwrap_or('-');
        }
        let field = match code {
            'D' | 'x' => strftime("%m/%d/%y", seconds)?,
            'F' => strftime("%Y-%m-%d", seconds)?,
            'T' | 'X' => strftime("%H:%M:%S", seconds)?,
            'R' => strftime("%H:%M", seconds)?,
            'c' => strftime("%a %b %e %H:%M:%S %Y", seconds)?,
            _ => {
                let flag = if unpadded { "-" } else { "" };
                field(code, seconds).ok_or_else(|| format!("{flag}{code}"))?
            }
        };
        text += match field.trim_start_matches(['0', ' ']) {
            "" if unpadded => "0",
            digits if unpadded => digits,
            _ => &field,
        };
    }
    Ok(text)
}

/// The field of one conversion letter.
fn field(code: char, seconds: u64) -> Option<String> {
    let (year, month, day) = date(seconds / DAY);
    let (name, weekday) = (MONTHS[month - 1], DAYS[(seconds / DAY % 7) as usize]);
    let hour = seconds / 3600 % 24;
    let half = if hour.is_multiple_of(12) { 12 } else { hour % 12 };
    let sunday_first = (seconds / DAY + 4) % 7;
    Some(match code {
        'Y' => format!("{year}"),
        'y' => format!("{:02}", year % 100),
        'm' => format!("{month:02}"),
        'd' => format!("{day:02}"),
        'e' => format!("{day:2}"),
        'j' => format!("{:03}", (1..month).map(|month| month_length(year, month)).sum::<u64>() + day),
        'B' => name.to_owned(),
        'b' | 'h' => name[..3].to_owned(),
        'A' => weekday.to_owned(),
        'a' => weekday[..3].to_owned(),
        'w' => format!("{sunday_first}"),
        'u' => format!("{}", if sunday_first == 0 { 7 } else { sunday_first }),
        'H' => format!("{hour:02}"),
        'I' => format!("{half:02}"),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'M' => format!("{:02}", seconds / 60 % 60),
        'S' => format!("{:02}", seconds % 60),
        '%' => "%".to_owned(),
        // `datetime.now()` has no zone.
        'Z' | 'z' => String::new(),
        _ => return None,
    })
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

/// The days of a month (1..=12).
fn month_length(year: u64, month: usize) -> u64 {
    [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month - 1]
}

/// Gregorian year, month (1..=12) and day (1..=31), `days` after 1 January 1970.
fn date(mut days: u64) -> (u64, usize, u64) {
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    while days >= month_length(year, month) {
        days -= month_length(year, month);
        month += 1;
    }
    (year, month, days + 1)
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
        assert_eq!(
            strftime("%-d/%-m/%y %-I:%M %p day %j %-j %w%u", 0).as_deref(),
            Ok("1/1/70 12:00 AM day 001 1 44")
        );
        let all = "%D %F %T %R %e %-H|%c|%Z";
        let expected = "12/31/24 2024-12-31 23:59:59 23:59 31 23|Tue Dec 31 23:59:59 2024|";
        assert_eq!(strftime(all, 1_735_689_599).as_deref(), Ok(expected));
        assert_eq!(strftime("%-H %-M", 0).as_deref(), Ok("0 0"));
        assert_eq!((strftime("%Q", 0), strftime("%-Q", 0)), (Err("Q".to_owned()), Err("-Q".to_owned())));
    }
}
