//! The readers, each with a way to feed it one input. An accepted input is used as `generate` would use it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tilewright::attention::variant::ExpressionVariant;
use tilewright_serve::model::{ChatTemplate, GenerationDefaults, Message, ModelConfig, Tokenizer, Weights};

const VOCAB_SIZE: usize = 4096;

/// A text with several scripts, special tokens and bytes that need a fallback.
const TEXT: &str = "the pages, naïve 日本 🧱<|eot_id|> aaaa  1234\n\t<s>";

/// A reader with its work folder.
pub(super) struct Target {
    name: &'static str,
    dir: PathBuf,
    /// The command line, for `plan`.
    program: Option<PathBuf>,
}

impl Target {
    pub(super) const NAMES: [&str; 9] = [
        "config", "generation_config", "tokenizer", "tokenizer_config", "chat_template", "safetensors",
        "safetensors_index", "variant", "plan",
    ];

    /// The target `name`, which writes its input to a folder in `work`. Files beside the input come from `fixtures`.
    pub(super) fn new(
        name: &str,
        work: &Path,
        fixtures: &Path,
        program: Option<PathBuf>,
    ) -> Result<Self, String> {
        let known = Self::NAMES.into_iter().find(|known| *known == name);
        let name =
            known.ok_or_else(|| format!("{name} is no target, expected {}", Self::NAMES.join(", ")))?;
        let dir = work.join("model");
        fs::create_dir_all(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
        let target = Self { name, dir, program };
        target.write_companions(fixtures)?;
        Ok(target)
    }

    /// Files that the reader reads beside its input.
    fn write_companions(&self, fixtures: &Path) -> Result<(), String> {
        let copies: &[(&str, &str)] = match self.name {
            "tokenizer_config" => &[("llama/tokenizer.json", "tokenizer.json")],
            "safetensors_index" => &[
                ("qwen2/model-00001-of-00003.safetensors", "model-00001-of-00003.safetensors"),
                ("qwen2/model-00002-of-00003.safetensors", "model-00002-of-00003.safetensors"),
                ("qwen2/model-00003-of-00003.safetensors", "model-00003-of-00003.safetensors"),
            ],
            _ => &[],
        };
        for (from, to) in copies {
            fs::copy(fixtures.join(from), self.dir.join(to)).map_err(|why| format!("{from}: {why}"))?;
        }
        Ok(())
    }

    /// Runs the reader on `input`. An error is a failure of the reader; a refused input is none.
    pub(super) fn run(&self, input: &[u8]) -> Result<(), String> {
        let text = String::from_utf8_lossy(input);
        match self.name {
            "config" => {
                if let Ok(config) = ModelConfig::parse(&text) {
                    config.parameters().take(1000).for_each(drop);
                }
            }
            "generation_config" => {
                if let Ok(defaults) = GenerationDefaults::parse(&text, VOCAB_SIZE) {
                    let params = defaults.sampling(Default::default());
                    params.validate().map_err(|why| format!("accepted, but {why}"))?;
                    drop((defaults.taken(), defaults.edits()));
                }
            }
            "tokenizer" => {
                self.write("tokenizer.json", input)?;
                self.use_tokenizer()?;
            }
            "tokenizer_config" => {
                self.write("tokenizer_config.json", input)?;
                self.use_tokenizer()?;
                self.render();
            }
            "chat_template" => {
                self.write("chat_template.jinja", input)?;
                self.render();
            }
            "safetensors" => {
                self.write("model.safetensors", input)?;
                self.use_weights();
            }
            "safetensors_index" => {
                self.write("model.safetensors.index.json", input)?;
                self.use_weights();
            }
            "variant" => drop(ExpressionVariant::from_json(&text)),
            _ => self.plan(input)?,
        }
        Ok(())
    }

    fn write(&self, name: &str, input: &[u8]) -> Result<(), String> {
        fs::write(self.dir.join(name), input).map_err(|why| format!("cannot write {name}: {why}"))
    }

    /// Encodes and decodes; the streamed text must equal the text decoded at once.
    fn use_tokenizer(&self) -> Result<(), String> {
        let Ok(tokenizer) = Tokenizer::open(&self.dir, VOCAB_SIZE) else { return Ok(()) };
        let Ok(ids) = tokenizer.encode(TEXT, true) else { return Ok(()) };
        let mut decoders = vec![tokenizer.decoder()];
        decoders.extend(tokenizer.decoder_after(&ids));
        let _ = tokenizer.decode(&ids);
        for mut decoder in decoders {
            if ids.iter().all(|&id| decoder.push(id).is_ok()) {
                let _ = decoder.finish();
            }
        }
        Ok(())
    }

    fn render(&self) {
        let Ok(Some(template)) = ChatTemplate::open(&self.dir) else { return };
        let turns =
            [("system", "You lay tiles."), ("user", "How many?\r\n🧱"), ("assistant", ""), ("user", "a")];
        let messages: Vec<Message> = turns.iter().map(|(role, text)| Message::new(*role, *text)).collect();
        let _ = (template.render(&messages, true), template.render(&messages[1..2], false));
    }

    fn use_weights(&self) {
        let Ok(weights) = Weights::open(&self.dir) else { return };
        let names: Vec<String> = weights.names().map(str::to_owned).collect();
        for name in names {
            for shape in [&[3, 2][..], &[6], &[64], &[288, 64], &[0]] {
                if let Ok(tensor) = weights.get(&name, shape) {
                    std::hint::black_box(tensor.view());
                }
            }
        }
        weights.load(|_| {});
    }

    /// The command line must end with its exit codes for success and refusal.
    fn plan(&self, input: &[u8]) -> Result<(), String> {
        let program = self.program.as_ref().ok_or("the target plan needs --program")?;
        self.write("batch.json", input)?;
        let output = Command::new(program)
            .args(["plan", "--json"])
            .arg(self.dir.join("batch.json"))
            .stdin(Stdio::null())
            .output()
            .map_err(|why| format!("{} does not start: {why}", program.display()))?;
        match output.status.code() {
            Some(0..=2) => Ok(()),
            _ => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))),
        }
    }
}
