//! `format % values` of Python, for the conversions that templates use.

use super::{
    objects::Tuple,
    text::{float_repr, refuse, repr, str},
};
use minijinja::{Error, Value};

/// Maximum width and precision.
const MAX_WIDTH: usize = 1000;

/// `format % values`; a tuple gives several values.
pub(super) fn format(format: &str, values: &Value) -> Result<String, Error> {
    let values = values.downcast_object_ref::<Tuple>().map_or_else(|| vec![values.clone()], |t| t.0.clone());
    let mut values = values.into_iter();
    let mut text = String::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once('%') {
        text.push_str(before);
        let conversion = Conversion::parse(after)?;
        rest = &after[conversion.length..];
        match conversion.letter {
            '%' => text.push('%'),
            _ => {
                let value = values.next().ok_or_else(|| refuse("not enough arguments for format string"))?;
                text.push_str(&conversion.apply(&value)?);
            }
        }
    }
    text.push_str(rest);
    match values.next() {
        Some(_) => Err(refuse("not all arguments converted during string formatting")),
        None => Ok(text),
    }
}

struct Conversion {
    left: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
    letter: char,
    length: usize,
}

impl Conversion {
    fn parse(text: &str) -> Result<Self, Error> {
        let flags = text.len() - text.trim_start_matches(['-', '0']).len();
        let (left, zero) = (text[..flags].contains('-'), text[..flags].contains('0'));
        let mut at = flags;
        let number = |at: &mut usize| -> Option<usize> {
            let digits = text[*at..].bytes().take_while(u8::is_ascii_digit).count();
            let number = text[*at..*at + digits].parse().ok().filter(|&number| number <= MAX_WIDTH);
            *at += digits;
            number
        };
        let width = number(&mut at).unwrap_or(0);
        let mut precision = None;
        if text[at..].starts_with('.') {
            at += 1;
            precision = Some(number(&mut at).unwrap_or(0));
        }
        let letter = text[at..].chars().next().ok_or_else(|| refuse("incomplete format"))?;
        Ok(Self { left, zero, width, precision, letter, length: at + letter.len_utf8() })
    }

    fn apply(&self, value: &Value) -> Result<String, Error> {
        let text = match (self.letter, self.precision) {
            ('s', precision) => str(value)?.chars().take(precision.unwrap_or(usize::MAX)).collect(),
            ('r', None) => repr(value, false)?,
            ('d' | 'i', None) if value.is_number() => match value.as_i64() {
                Some(integer) => integer.to_string(),
                // an int has no negative zero
                None => format!("{:.0}", f64::try_from(value.clone())?.trunc() + 0.0),
            },
            ('f', precision) if value.is_number() => {
                let number = f64::try_from(value.clone())?;
                if !number.is_finite() {
                    return Ok(float_repr(number));
                }
                format!("{number:.*}", precision.unwrap_or(6))
            }
            (letter, _) => {
                return Err(refuse(format!(
                    "the conversion %{letter} of a {} is not supported",
                    value.kind()
                )));
            }
        };
        let missing = self.width.saturating_sub(text.chars().count());
        let numeric = matches!(self.letter, 'd' | 'i' | 'f');
        Ok(match (self.left, self.zero && numeric, text.strip_prefix('-')) {
            (true, _, _) => text + &" ".repeat(missing),
            (_, true, Some(digits)) => format!("-{}{digits}", "0".repeat(missing)),
            (_, true, None) => "0".repeat(missing) + &text,
            _ => " ".repeat(missing) + &text,
        })
    }
}
