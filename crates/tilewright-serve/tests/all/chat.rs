//! Chat templates compared with Jinja2, and templates that exceed their budget.

use crate::fixtures::{folder, messages, read_json};
use std::time::Instant;
use tilewright_serve::model::ChatTemplate;

/// Templates that Jinja2 renders and that are refused, because minijinja would render something else.
const REFUSED: [&str; 24] = [
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1, 'A': 2} | dictsort(false, 'value') }}",
    "{{ '{} and {}'.format('a', 1) }}{{ '{1}{0}'.format('a', 'b') }}{{ '{x}'.format(x='y') }}",
    "{{ messages[0].content | upper | replace('A', 'x') | trim ~ '!' }}{{ messages[0].content | e }}",
    "{{ 1_000 }}{{ 0x1f }}{{ 0b11 }}{{ 1.5e3 }}{{ 12345678901234567890 }}{{ -3 }}{{ - 3 + 5 }}{{ +3 }}",
    "{{ (1, 2) + (3,) }}",
    "{{ 1, 2 }}",
    "{{ [1, 2] < [1, 3] }}",
    "{{ (1, 2) * 2 }}",
    "{{ (1, 2, 3)[1:] }}",
    "{{ namespace(a=1) }}",
    "{{ messages[0].content.encode('utf-8') }}",
    "{{ '%c' % 'x' }}{{ '%x' % 255 }}",
    "{{ 'abc' | wordcount }}{{ 'a b c' | truncate(3) }}{{ 'x' | center(5) }}",
    "{{ messages[0].content + ('12') | safe }}",
    "{{ true and none }}{{ 1 or 2 }}",
    "{{ ((1, 2))[::-1] }}",
    "{{ range(4)[:2] }}{{ (range(4))[1:] }}",
    "{{ (-0.5) ** 2 }}",
    "{{ ((1, 2)) * 2 }}",
    "{{ 1e20 | int }}",
    "{% for x in [1, 2] %}{{ x }}{% continue %}{% else %}none{% endfor %}",
    "{{ ['a' | safe] }}",
    "{{ ((1, 2) if true else [])[::-1] }}",
    "{{ (range(3) if true else [])[1:] }}",
];

fn open(template: &str) -> Result<ChatTemplate, String> {
    let tokens = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    let dir = folder(&[("chat_template.jinja", template), ("tokenizer_config.json", tokens)]);
    ChatTemplate::open(dir.path()).map(Option::unwrap).map_err(|error| error.to_string())
}

#[test]
fn templates_render_as_jinja2_or_are_refused() {
    let table = read_json("chat/expected.json");
    let conversations = table["conversations"].as_array().unwrap();
    let rows = table["templates"].as_array().unwrap();
    assert!(rows.len() >= 100 && conversations.len() == 10);
    let (mut wrong, mut refused) = (Vec::new(), Vec::new());
    for row in rows {
        let (name, texts) = (row["name"].as_str().unwrap(), row["texts"].as_array().unwrap());
        let template = open(row["template"].as_str().unwrap());
        for (at, conversation) in conversations.iter().enumerate() {
            let text = texts[at.min(texts.len() - 1)].as_str();
            let prompt = conversation["add_generation_prompt"].as_bool().unwrap();
            let rendered = template.as_ref().map_err(Clone::clone).and_then(|template| {
                template.render(&messages(conversation), prompt).map_err(|error| error.to_string())
            });
            match (rendered, text) {
                (Err(reason), Some(_)) if !refused.iter().any(|(refused, _)| *refused == name) => {
                    refused.push((name, reason));
                }
                (Ok(rendered), text) if text != Some(rendered.as_str()) => {
                    wrong.push(format!("{name}\n   conversation {at}: {rendered:?}\n   Jinja2: {text:?}"));
                }
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let names: Vec<&str> = refused.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, REFUSED, "{refused:#?}");
}

/// Templates, and the reason for which each is stopped, unless a slow machine reaches the time limit of 1 s first.
const ENDLESS: &[(&str, &str)] = &[
    ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "ran out of fuel"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion limit"),
    (
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "a namespace keeps too long a text",
    ),
    (
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "a namespace keeps too long a text",
    ),
    (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "a list is too long for `+`",
    ),
    (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
        "a namespace keeps",
    ),
    (
        "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "a namespace keeps lists that are nested too deep",
    ),
    (
        "{% set x = 'x' * 4000000 %}{% for i in range(90000) %}{% if x == x ~ 'y' %}{% endif %}{% endfor %}",
        "longer than 1 s",
    ),
    (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('x', 'xxxxxxxx') %}{% endfor %}",
        "has more than 4 MiB",
    ),
    ("{% set x = 'x' * 4000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}", "the output exceeds 32 MiB"),
    (
        "{% set x %}{% for i in range(90000) %}{% for j in range(9) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}{% endset %}",
        "the output exceeds 32 MiB",
    ),
];

#[test]
fn endless_templates_are_stopped() {
    for &(template, reason) in ENDLESS {
        let start = Instant::now();
        let error = open(template).and_then(|template| template.render(&[], true).map_err(|e| e.to_string()));
        let error = error.unwrap_err();
        assert!(error.starts_with("model.chat: the template of chat_template.jinja "), "{error}");
        let stopped = [reason, "longer than 1 s"].iter().any(|reason| error.contains(reason));
        assert!(stopped, "{template}: {error}");
        println!("{:?}: {template}", start.elapsed());
        assert!(start.elapsed().as_secs() < 60, "{template}");
    }
}

#[test]
fn deeply_nested_templates_do_not_exhaust_the_stack() {
    for (part, count) in [
        ("[", 5000),
        ("-", 100_000),
        ("not ", 100_000),
        ("1 + ", 50_000),
        ("1 if 1 else ", 50_000),
        ("1 ~ ", 2000),
        ("1 and ", 4000),
        ("- ", 4000),
        ("not ", 4000),
        ("1 ** ", 2000),
    ] {
        let template = format!("{{{{ {}1 }}}}", part.repeat(count));
        // Accepted or refused, but the process goes on.
        let rendered =
            open(&template).and_then(|template| template.render(&[], true).map_err(|e| e.to_string()));
        assert!(rendered.is_err() || count <= 4096, "{part}");
    }
    for part in [
        "{% if true %}",
        "{% for x in [1] %}",
        "{% if 1 %}{% elif 2 %}",
        "{{ 1|string|string }}",
        "{% set a %}",
    ] {
        let template = part.repeat(20_000);
        let start = Instant::now();
        let rendered =
            open(&template).and_then(|template| template.render(&[], true).map_err(|e| e.to_string()));
        assert!(rendered.is_err() || part.starts_with("{{"), "{part}");
        // a scan of the rest of the template per tag takes more than a minute
        assert!(start.elapsed().as_secs() < 20, "{part}: {:?}", start.elapsed());
    }
}

#[test]
fn an_error_names_the_file_that_holds_the_template() {
    let config = r#"{"chat_template": "{{ raise_exception('no') }}"}"#;
    let dir = folder(&[("tokenizer_config.json", config)]);
    let template = ChatTemplate::open(dir.path()).unwrap().unwrap();
    assert_eq!(
        template.render(&[], true).unwrap_err().to_string(),
        "model.chat: the template of tokenizer_config.json fails: line 1: no"
    );
    assert_eq!(
        open("{{ 1").unwrap_err(),
        "model.chat: the template of chat_template.jinja does not parse: a tag does not end"
    );
}
