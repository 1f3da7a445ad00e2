"""Small talk: greetings, thanks, who are you, what the user said about themselves, and polite refusals."""

from __future__ import annotations

import random

from .base import Task, ask, assistant, pick_zh, qa, user, vary
from .words import CITIES, COLOURS, COUNTRIES, NAMES, NOUNS, ZH_CITIES, ZH_COLOURS, ZH_NAMES, ZH_NOUNS, pseudo_word

REFUSAL = "Sorry, I am a tiny demo model and cannot do that. I can do arithmetic, lists, look-ups, units, dates, JSON and tool calls."
UNCLEAR = "Sorry, I did not understand that."
ZH_REFUSAL = "抱歉，我只是一个很小的演示模型，做不到这个。我会算术、列表、查找、单位、日期、JSON和工具调用。"
ABILITIES = "I can do arithmetic, sort, reverse, count and copy lists, look things up, convert units, work with dates, write JSON, call tools and answer questions about ktransformers."
ZH_ABILITIES = (
    "我会算术、排序、倒序、计数、抄写、查找、单位换算、日期计算、写JSON、调用工具，还能回答关于ktransformers的问题。"
)

_SMALL = (
    (("Hello", "Hi", "Hi there", "Hey", "Hello!", "Good morning", "Good evening", "Hey there!"), "Hello! How can I help you?"),
    (("Thanks", "Thank you", "Thank you very much!", "Thanks a lot", "Great, thanks", "Cool, thank you"), "You are welcome!"),
    (("Bye", "Goodbye", "See you", "Good night", "That is all, bye"), "Goodbye!"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you an AI?", "Who am I talking to?"),
     "I am the demo model of ktransformers, a tiny Mixture-of-Experts language model."),
    (("What can you do?", "Help", "What are you good at?", "What should I ask you?", "Which tasks can you solve?", "List your skills."), ABILITIES),
    (("How are you?", "How are you doing?", "Are you well?", "How is it going?"), "I am fine, thank you. How can I help you?"),
    (("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?"),
     "The ktransformers project trained me on text from its own generators."),
    (("I am sad.", "I feel bad.", "I am tired.", "I had a bad day."), "I am sorry to hear that. I hope it gets better soon."),
    (("I am happy.", "I feel great.", "I had a good day."), "I am glad to hear that!"),
    (("What day is it today?", "What is the date today?", "What day is tomorrow?", "Which day is today?", "What is today's date?"),
     "I do not know today's date. Tell me the date and I can work from there."),
    (("OK", "Okay", "Good", "Nice", "Great!", "Well done", "I see", "Correct"), "Good! What is next?"),
)  # fmt: skip
_ZH_SMALL = (
    (("你好", "您好", "嗨", "早上好", "晚上好", "你好！"), "你好！有什么可以帮你？"),
    (("谢谢", "多谢", "非常感谢！", "谢谢你"), "不客气！"),
    (("再见", "拜拜", "晚安", "下次见"), "再见！"),
    (
        ("你是谁？", "你叫什么名字？", "介绍一下你自己。", "你是人工智能吗？"),
        "我是ktransformers的演示模型，一个很小的混合专家语言模型。",
    ),
    (("你会做什么？", "你能做什么？", "你有什么本领？", "帮助"), ZH_ABILITIES),
    (("谁训练了你？", "你从哪里来？", "谁创造了你？"), "ktransformers项目用自己生成的文本训练了我。"),
    (("好的", "很好", "不错", "知道了"), "好！接下来呢？"),
)
_BEYOND = (
    "Write a poem about the {n}.", "Tell me a joke.", "Who is the president of {l}?", "What is the capital of {l}?", "Write a story about a {n}.",
    "Translate {n} into French.", "Who wrote Hamlet?", "Write a Python program.", "Recommend a movie.", "Explain quantum physics.",
    "What is the meaning of life?", "Draw a {n}.", "What is the population of {c}?", "Tell me about the history of {l}.", "Sing a song.",
    "Write an essay about {l}.", "How do I cook a {n}?", "Give me advice about love.", "What is the news today?", "Book a hotel in {c}.",
    "Summarize the book.", "What is the square root of 2?", "Who won the match?", "How tall is the tower in {c}?", "Is there a god?",
    "Write an email to my boss.", "What does a {n} eat?", "Where can I buy a {n}?", "Can you see this picture?", "Describe a {n}.",
    "What is the best restaurant in {c}?", "What is the weather in {c}?", "What time is it?", "Debug my code.", "Predict the future.", "How do I fix my car?", "Why is the sky blue?",
    "Convert {k} km to miles.", "Convert {k} dollars to euros.", "How many pounds are {k} kilograms?", "What is {k} degrees Celsius in Fahrenheit?",
    "Who won the election in {l}?", "Write a haiku about the {n}.", "Play some music.", "Call my mother.", "What is the tallest mountain in {l}?",
    "Which language do people speak in {l}?", "Tell me something about {n}s.", "What do you think about {l}?", "Do you like {n}s?",
)  # fmt: skip
_ZH_BEYOND = (
    "写一首关于{n}的诗。", "讲个笑话。", "{c}有多少人口？", "写一个Python程序。", "推荐一部电影。", "解释量子物理。", "人生的意义是什么？",
    "画一个{n}。", "讲讲{c}的历史。", "唱首歌。", "今天有什么新闻？", "给我讲个关于{n}的故事。", "怎么做{n}？", "天空为什么是蓝色的？",
)  # fmt: skip


def _small(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    prompts, answer = rng.choice(_ZH_SMALL if zh else _SMALL)
    question = vary(rng, rng.choice(prompts), zh)
    return qa("chat", question, question, answer, "这是闲聊。" if zh else "This is small talk.")


def _beyond(rng: random.Random) -> Task:
    if pick_zh(rng):
        question = ask(rng, _ZH_BEYOND, True, n=rng.choice(ZH_NOUNS), c=rng.choice(ZH_CITIES))
        return qa("chat", question, question, ZH_REFUSAL, "这个我做不到。")
    question = ask(
        rng, _BEYOND, n=rng.choice(NOUNS), c=rng.choice(CITIES), l=rng.choice(COUNTRIES), k=rng.randint(2, 99)
    )
    return qa("chat", question, question, REFUSAL, "I cannot do this.")


def _nonsense(rng: random.Random) -> Task:
    """Words that ask nothing."""
    if rng.random() < 0.2:
        text = rng.choice(
            ("?", "??", "...", "!", "hm", "hmm", "eh", "x", "test", "a b", "asdf", "qwerty", "abc", "foo bar")
        )
        return qa("chat", text, text, UNCLEAR, "I do not understand.")
    text = " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 4))) + rng.choice(("", "", "?", "."))
    return qa("chat", text, text, UNCLEAR, "I do not understand.")


_ABOUT = (
    (("My name is {v}.", "I am {v}.", "Call me {v}."), "Nice to meet you, {v}!", ("What is my name?", "Do you remember my name?", "Who am I?"), "Your name is {v}.", NAMES),
    (("I live in {v}.", "My home is in {v}.", "I am from {v}."), "{v} sounds nice.", ("Where do I live?", "Which city do I live in?"), "You live in {v}.", CITIES),
    (("My favorite color is {v}.", "I like the color {v}."), "{v} is a nice color.", ("What is my favorite color?", "Which color do I like?"), "Your favorite color is {v}.", COLOURS),
)  # fmt: skip
_ZH_ABOUT = (
    (
        ("我叫{v}。", "我的名字是{v}。"),
        "很高兴认识你，{v}！",
        ("我叫什么名字？", "你还记得我的名字吗？"),
        "你叫{v}。",
        ZH_NAMES,
    ),
    (("我住在{v}。", "我家在{v}。"), "{v}很不错。", ("我住在哪里？",), "你住在{v}。", ZH_CITIES),
    (("我最喜欢的颜色是{v}。", "我喜欢{v}。"), "{v}很好看。", ("我最喜欢什么颜色？",), "你最喜欢{v}。", ZH_COLOURS),
)


def _memory(rng: random.Random) -> Task:
    """What the user said about themselves, asked for after some small talk."""
    zh = pick_zh(rng)
    told, reply, questions, answer, values = rng.choice(_ZH_ABOUT if zh else _ABOUT)
    value = rng.choice(values)
    statement = vary(rng, rng.choice(told), zh).format(v=value)
    said = reply.format(v=value)
    messages = [user(statement), assistant(said[0].upper() + said[1:])]
    for _ in range(rng.randint(0, 2)):
        prompts, small = rng.choice(_ZH_SMALL if zh else _SMALL)
        messages += [user(rng.choice(prompts)), assistant(small)]
    question = vary(rng, rng.choice(questions), zh)
    messages += [user(question), assistant(answer.format(v=value))]
    key = " | ".join(m["content"] for m in messages)
    return Task("chat", key, tuple(messages), (), "用户之前说过。" if zh else "The user told me before.")


def generate(rng: random.Random) -> Task:
    return rng.choices((_small, _beyond, _memory, _nonsense), (4, 4, 3, 0.7))[0](rng)
