//! Filters and tests of Jinja2 whose results differ from those of minijinja.

use super::{
    json::{JsonFormat, json},
    methods::{self, Side, strip},
    objects::{Generator, pair},
    operators::{extreme, unique},
    printf,
    text::{MAX_TEXT, checked, refuse, repr, str},
};
use minijinja::{
    Environment, Error, State, Value, filters,
    value::{Kwargs, Rest, ValueKind},
};
use std::borrow::Cow;

/// The state of a rendering.
type S<'a> = State<'a, 'a>;

/// The name of a test.
type Text<'a> = Option<Cow<'a, str>>;

/// The width at which `pprint` breaks lines, which is not supported.
const PPRINT_WIDTH: usize = 80;

/// Adds the filters and tests to `environment`.
pub(super) fn add(environment: &mut Environment<'_>) {
    add_texts(environment);
    add_sequences(environment);
    add_tests(environment);
}

fn add_texts(environment: &mut Environment<'_>) {
    environment.add_filter("string", |value: &Value| str(value));
    environment.add_filter("safe", |value: &Value| str(value));
    environment.add_filter("upper", |value: &Value| Ok::<_, Error>(str(value)?.to_uppercase()));
    environment.add_filter("lower", |value: &Value| Ok::<_, Error>(str(value)?.to_lowercase()));
    environment.add_filter("capitalize", |value: &Value| Ok::<_, Error>(methods::capitalize(&str(value)?)));
    environment.add_filter("title", |value: &Value| Ok::<_, Error>(title(&str(value)?)));
    environment.add_filter("trim", |value: &Value, chars: Option<&str>| {
        Ok::<_, Error>(strip(&str(value)?, chars, Side::Both).to_owned())
    });
    environment.add_filter("replace", |value: &Value, old: &Value, new: &Value, count: Option<i64>| {
        methods::replace(&str(value)?, &str(old)?, &str(new)?, count)
    });
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("format", |format: &str, values: Rest<Value>| {
        checked(printf::format(format, &Value::from_object(super::objects::Tuple(values.0)))?)
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("pprint", |value: &Value| {
        let text = repr(value, true)?;
        if text.len() > PPRINT_WIDTH {
            return Err(refuse(format!("pprint of more than {PPRINT_WIDTH} characters is not supported")));
        }
        Ok(text)
    });
    environment.add_filter("round", round);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
}

fn add_sequences(environment: &mut Environment<'_>) {
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("list", list);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("attr", attr);
    environment.add_filter("items", |value: &Value| Ok::<_, Error>(generator(methods::items(value)?)));
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("sort", sort);
    environment.add_filter("max", |value: &Value| extreme(value, ">"));
    environment.add_filter("min", |value: &Value| extreme(value, "<"));
    environment.add_filter("unique", |value: &Value| unique(value).map(generator));
    environment.add_filter("reverse", |value: &Value| {
        let mut items = list(value)?;
        items.reverse();
        match value.as_str() {
            Some(text) => Ok::<_, Error>(Value::from(text.chars().rev().collect::<String>())),
            None => Ok(generator(items)),
        }
    });
    // Lazy in Jinja2: their results have neither a length nor a text.
    environment.add_filter("map", |state: &State<'_, '_>, value: Value, args: Rest<Value>| {
        filters::map(state, value, args).map(generator)
    });
    environment.add_filter("select", |state: &S, value: Value, test: Text, args: Rest<Value>| {
        filters::select(state, value, test, args).map(generator)
    });
    environment.add_filter("reject", |state: &S, value: Value, test: Text, args: Rest<Value>| {
        filters::reject(state, value, test, args).map(generator)
    });
    environment.add_filter(
        "selectattr",
        |state: &S, value: Value, key: Cow<'_, str>, test: Text, args: Rest<Value>| {
            filters::selectattr(state, value, key, test, args).map(generator)
        },
    );
    environment.add_filter(
        "rejectattr",
        |state: &S, value: Value, key: Cow<'_, str>, test: Text, args: Rest<Value>| {
            filters::rejectattr(state, value, key, test, args).map(generator)
        },
    );
}

fn add_tests(environment: &mut Environment<'_>) {
    // Whatever has a length and items: texts and dicts too.
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable | ValueKind::Undefined
        ) && value.downcast_object_ref::<Generator>().is_none()
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable | ValueKind::Undefined
        )
    });
    // Python's bool is an int.
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("odd", |value: &Value| remainder(value, 2).map(|rest| rest != 0));
    environment.add_test("even", |value: &Value| remainder(value, 2).map(|rest| rest == 0));
    environment.add_test("divisibleby", |value: &Value, divisor: i64| {
        remainder(value, divisor).map(|rest| rest == 0)
    });
    environment.add_test("upper", |value: &Value| Ok::<_, Error>(methods::is_upper(&str(value)?)));
    environment.add_test("lower", |value: &Value| Ok::<_, Error>(methods::is_lower(&str(value)?)));
}

fn remainder(value: &Value, divisor: i64) -> Result<i64, Error> {
    let rest = value.as_i64().filter(|_| value.is_integer()).and_then(|value| value.checked_rem(divisor));
    rest.ok_or_else(|| refuse(format!("the remainder of a {} by {divisor} is not supported", value.kind())))
}

/// Sorts items that Python can compare.
fn sort(state: &S, value: Value, options: Kwargs) -> Result<Value, Error> {
    let items = bounded(&value)?;
    let first = items.first().map_or(ValueKind::Undefined, Value::kind);
    let comparable =
        matches!(first, ValueKind::Number | ValueKind::String) && items.iter().all(|v| v.kind() == first);
    if !items.is_empty() && !comparable && !options.has("attribute") {
        return Err(refuse(format!("sort of values like a {first} is not supported")));
    }
    filters::sort(state, value, options)
}

fn generator(items: Vec<Value>) -> Value {
    Value::from_object(Generator(items))
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(text.chars().count()),
        None if value.is_undefined() => Ok(0),
        None if value.downcast_object_ref::<Generator>().is_some() => {
            Err(refuse("object of type 'generator' has no len()"))
        }
        None => value.len().ok_or_else(|| refuse(format!("a {} has no length", value.kind()))),
    }
}

pub(super) fn list(value: &Value) -> Result<Vec<Value>, Error> {
    match value.as_str() {
        Some(text) => Ok(text.chars().map(Value::from).collect()),
        None => bounded(value),
    }
}

/// The items of `value`; a lazy sum of lists may have any number.
fn bounded(value: &Value) -> Result<Vec<Value>, Error> {
    if value.is_none() {
        return Err(refuse("none is not iterable"));
    }
    let items: Vec<Value> = value.try_iter()?.take(MAX_TEXT / 16 + 1).collect();
    if items.len() > MAX_TEXT / 16 {
        return Err(refuse(format!("a list has more than {} items", MAX_TEXT / 16)));
    }
    Ok(items)
}

fn default(
    value: Value,
    other: Option<Value>,
    boolean: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = options.get("default_value")?;
    let boolean = boolean.or(options.get("boolean")?).unwrap_or(false);
    options.assert_all_used()?;
    let absent = value.is_undefined() || boolean && !value.is_true();
    Ok(if absent { other.or(named).unwrap_or_else(|| Value::from("")) } else { value })
}

/// `getattr`, which does not look into dicts.
fn attr(value: &Value, name: &str) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map if !methods::DICT.contains(&name) => Ok(Value::UNDEFINED),
        ValueKind::None | ValueKind::Bool | ValueKind::Number => Ok(Value::UNDEFINED),
        kind => Err(refuse(format!("attr({name:?}) of a {kind} is not supported"))),
    }
}

fn join(value: &Value, separator: Option<&Value>, options: Kwargs) -> Result<String, Error> {
    let separator = separator.map_or(Ok(String::new()), str)?;
    let attribute: Option<Value> = options.get("attribute")?;
    options.assert_all_used()?;
    let mut text = String::new();
    let items = if value.is_undefined() { Vec::new() } else { list(value)? };
    for (at, item) in items.iter().enumerate() {
        text.push_str(if at > 0 { &separator } else { "" });
        match &attribute {
            Some(key) => text.push_str(&str(&item.get_item(key)?)?),
            None => text.push_str(&str(item)?),
        }
        if text.len() > MAX_TEXT {
            return Err(refuse("the result of join is too long"));
        }
    }
    Ok(text)
}

fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.map_or_else(|| options.get::<Option<Value>>("width"), |width| Ok(Some(width)))?;
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank: bool = options.get::<Option<bool>>("blank")?.unwrap_or(false);
    options.assert_all_used()?;
    let width = width.unwrap_or_else(|| Value::from(4));
    let indentation = match width.as_usize() {
        Some(width) if width <= 1000 => " ".repeat(width),
        _ => width.as_str().ok_or_else(|| refuse("indent: width is neither a number nor a text"))?.to_owned(),
    };
    // Jinja2 ends the text with a line end, so that `splitlines` returns the last empty line.
    let value =
        value.as_str().ok_or_else(|| refuse(format!("indent of a {}", value.kind())))?.to_owned() + "\n";
    let mut text = String::new();
    for (at, line) in methods::split_lines(&value, false).into_iter().enumerate() {
        if at > 0 {
            text.push('\n');
        }
        if if at == 0 { first } else { blank || !line.is_empty() } {
            text.push_str(&indentation);
        }
        text.push_str(line);
    }
    checked(text)
}

/// Jinja2's `title`: each run after a space, `-`, or an opening bracket starts with a capital.
fn title(text: &str) -> String {
    let breaks = |c: char| methods::is_space(c) || "-({[<".contains(c);
    let mut result = String::with_capacity(text.len());
    let mut start = true;
    for c in text.chars() {
        match (breaks(c), start) {
            (true, _) => result.push(c),
            (false, true) => result.extend(c.to_uppercase()),
            (false, false) => result.extend(c.to_lowercase()),
        }
        start = breaks(c);
    }
    result
}

/// `json.dumps(value, ensure_ascii=False)` with the options of `transformers`.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let format = JsonFormat {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: match indent {
            None => None,
            Some(indent) if indent.is_none() => None,
            Some(indent) => Some(match (indent.as_usize(), indent.as_str()) {
                (Some(width), _) => " ".repeat(width.min(100)),
                (_, Some(text)) => text.to_owned(),
                _ => return Err(refuse("tojson: indent is neither a number nor a text")),
            }),
        },
        item_separator: ", ".to_owned(),
        key_separator: ": ".to_owned(),
    };
    options.assert_all_used()?;
    let item = if format.indent.is_some() { "," } else { ", " }.to_owned();
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (item, format.key_separator.clone()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(refuse("tojson: separators are not two texts")),
    };
    checked(json(value, &JsonFormat { item_separator, key_separator, ..format })?)
}

fn dictsort(value: &Value, options: Kwargs) -> Result<Vec<Value>, Error> {
    let sorted = filters::dictsort(value, options)?;
    let pairs = sorted
        .try_iter()?
        .map(|entry| Ok(pair(entry.get_item(&Value::from(0))?, entry.get_item(&Value::from(1))?)));
    pairs.collect()
}

/// Rounds halves to even in the exact decimal value, like Python.
fn round(
    value: &Value,
    precision: Option<i32>,
    method: Option<&str>,
    options: Kwargs,
) -> Result<Value, Error> {
    let precision = precision.or(options.get("precision")?).unwrap_or(0);
    let named: Option<String> = options.get("method")?;
    options.assert_all_used()?;
    let method = method.or(named.as_deref()).unwrap_or("common");
    if !value.is_number() || !(0..=100).contains(&precision) {
        return Err(refuse(format!("round of a {} to {precision} digits is not supported", value.kind())));
    }
    let number = f64::try_from(value.clone())?;
    let scale = 10f64.powi(precision);
    match method {
        "common" if value.is_integer() => Ok(value.clone()),
        "common" => Ok(Value::from(format!("{number:.*}", precision as usize).parse().unwrap_or(number))),
        "ceil" | "floor" if !(number * scale).is_finite() => Err(refuse("cannot convert float to integer")),
        // an integer in Python, which has no negative 0
        "ceil" => Ok(Value::from(((number * scale).ceil() + 0.0) / scale)),
        "floor" => Ok(Value::from(((number * scale).floor() + 0.0) / scale)),
        _ => Err(refuse("method must be common, ceil or floor")),
    }
}

fn int(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0));
    options.assert_all_used()?;
    Ok(match value.as_str() {
        _ if value.is_undefined() => return Err(refuse("int of an undefined value")),
        _ if value.kind() == ValueKind::Bool => Value::from(value.is_true() as i64),
        _ if value.is_integer() => value.clone(),
        _ if value.is_number() => match f64::try_from(value.clone())? {
            number if number.is_infinite() => return Err(refuse("cannot convert float infinity to integer")),
            number => truncated(number)?.unwrap_or(default),
        },
        Some(text) => {
            let text = strip(text, None, Side::Both).replace('_', "");
            match text.parse::<i64>() {
                Ok(integer) => Value::from(integer),
                Err(_) => parse_float(&text).map_or(Ok(None), truncated)?.unwrap_or(default),
            }
        }
        None => default,
    })
}

/// The integer part; nothing of infinity and NaN.
fn truncated(number: f64) -> Result<Option<Value>, Error> {
    if number.is_finite() && number.abs() >= i64::MAX as f64 {
        return Err(refuse("the integer is too large"));
    }
    Ok(number.is_finite().then(|| Value::from(number.trunc() as i64)))
}

fn parse_float(text: &str) -> Option<f64> {
    strip(text, None, Side::Both).parse().ok()
}

fn float(value: &Value, default: Option<Value>) -> Result<Value, Error> {
    let default = default.unwrap_or_else(|| Value::from(0.0));
    Ok(match value.as_str() {
        _ if value.is_undefined() => return Err(refuse("float of an undefined value")),
        Some(text) => parse_float(text).map_or(default, Value::from),
        None => f64::try_from(value.clone()).map_or(default, Value::from),
    })
}
